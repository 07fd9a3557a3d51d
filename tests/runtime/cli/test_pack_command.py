"""`serai pack`: a packed folder that is a model again, told as JSON or to people."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serai.runtime.cli import pack as pack_command
from serai.runtime.cli.main import app
from serai.runtime.experts.packed_format import MANIFEST_NAME, layer_file
from tests.runtime.experts.packing import K3, LINEAR, written

runner = CliRunner()


def pack(*arguments: object) -> dict[str, Any]:
    result = runner.invoke(app, ["pack", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert isinstance(values, dict)
    return values


def test_a_packed_model_is_found_as_a_model_and_a_second_run_has_nothing_to_write(tmp_path: Path) -> None:
    source, out = written(tmp_path / "m", K3), tmp_path / "p"
    first = pack(source, out, "--verify")
    assert (first["experts"], first["relative_error"], first["verified_records"]) == ("as-stored", None, 10)
    assert first["written_bytes"] > 0
    assert (out / MANIFEST_NAME).is_file()
    planned = runner.invoke(app, ["eval", str(out), "--tokens", "none.npy", "--out", str(tmp_path / "o.npz")])
    assert "none.npy can't be read" in planned.stderr
    plans = [json.loads(runner.invoke(app, ["plan", str(path), "--json"]).stdout) for path in (source, out)]
    assert plans[0]["floor_bytes"] == plans[1]["floor_bytes"]
    again = pack(source, out)
    assert (again["written_bytes"], again["verified_records"]) == (0, None)
    assert again["kept_files"] > 0


def test_quantising_tells_what_it_changed(tmp_path: Path) -> None:
    made = pack(written(tmp_path / "m", LINEAR), tmp_path / "p", "--experts", "mxfp4")
    assert 0 < made["relative_error"] < 0.3
    people = runner.invoke(app, ["pack", str(tmp_path / "m"), str(tmp_path / "q"), "--experts", "mxfp4", "--verify"])
    assert people.exit_code == 0, people.stderr
    assert "% of the weights" in people.stdout
    assert "10 records, all as written" in people.stdout


def test_progress_is_told_a_tenth_at_a_time_where_nothing_can_be_redrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_command, "QUIET_S", -1.0)
    result = runner.invoke(app, ["pack", str(written(tmp_path / "m", K3)), str(tmp_path / "p"), "--verify", "--json"])
    assert result.exit_code == 0, result.stderr
    lines = result.stderr.splitlines()
    assert any(line.startswith("packing: ") for line in lines)
    assert sum(line.startswith("reading back: ") for line in lines) == 10
    json.loads(result.stdout)


def test_what_cannot_be_packed_is_one_sentence(tmp_path: Path) -> None:
    source, out = written(tmp_path / "m", K3), tmp_path / "p"
    pack(source, out)
    damaged = out / layer_file(1)
    content = bytearray(damaged.read_bytes())
    content[4096] ^= 1
    damaged.write_bytes(content)
    for arguments, kind in (
        ((source, out, "--verify"), "PackFailed"),
        ((source, source / "inside"), "PackFailed"),
        ((source, tmp_path / "x", "--experts", "mxfp4"), "BadParameter"),
        ((tmp_path / "nothing", tmp_path / "x"), "ModelNotFound"),
    ):
        result = runner.invoke(app, ["pack", *map(str, arguments), "--json"])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.stderr
        assert json.loads(result.stdout)["error"]["kind"] == kind
