"""`serai bench cache`: policies compared on a recorded trace."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serai.runtime.cli.main import app
from serai.runtime.experts.simulate import SyntheticRouting, simulate_ideal

runner = CliRunner()
ROUTING = SyntheticRouting(layers=3, experts=16, per_token=2, steps=20)


def recorded(folder: Path) -> Path:
    path = folder / "trace.npz"
    ROUTING.trace().save(path)
    return path


def test_every_policy_is_compared_at_every_size_with_the_ideal(tmp_path: Path) -> None:
    result = runner.invoke(
        app, ["bench", "cache", "--trace", str(recorded(tmp_path)), "--slots", "4", "--slots", "9", "--json"]
    )
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert (values["bench"], values["claims"]) == ("cache", [])
    assert [(row["slots"], row["policy"]) for row in values["table"]] == [
        (slots, policy) for slots in (4, 9) for policy in ("lru", "lfru", "next-use", "ideal")
    ]
    ideal = simulate_ideal(ROUTING.trace(), 9)
    assert values["table"][-1]["misses"] == ideal.misses
    assert all(row["hit_rate"] <= values["table"][-1]["hit_rate"] for row in values["table"])


def test_people_see_a_line_for_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["bench", "cache", "--trace", recorded(tmp_path).name])
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "trace.npz: 60 visits"
    assert lines[1].split() == ["slots", "lru", "lfru", "next-use", "ideal"]
    assert [line.split()[0] for line in lines[2:]] == ["3", "6", "12", "24"]


def test_what_is_no_trace_and_what_is_no_cache_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"no zip")
    for arguments in (["--trace", str(tmp_path / "x.npz")], ["--slots", "0"]):
        result = runner.invoke(app, ["bench", "cache", *arguments, "--json"])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert json.loads(result.stdout)["error"]["kind"] == "BadParameter"
