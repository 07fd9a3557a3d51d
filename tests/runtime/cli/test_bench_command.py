"""`serai bench`: one JSON object with the claims, or a table."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serai.runtime.bench import model, start
from serai.runtime.bench.model import Cell
from serai.runtime.bench.report import Report
from serai.runtime.cli.bench import bench_folder
from serai.runtime.cli.main import app
from serai.runtime.errors import BadParameter

runner = CliRunner()


def test_stdout_holds_one_object_and_progress_goes_to_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "first_token_s", lambda model, scratch: 1.25)
    result = runner.invoke(app, ["bench", "start", "--quick", "--dir", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["bench"] == "start"
    assert {claim["name"]: claim["holds"] for claim in values["claims"]} == {"cold_start_s": None, "warm_start_s": True}
    assert "warm start 3" in result.stderr


def test_people_get_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "first_token_s", lambda model, scratch: 4.0)
    result = runner.invoke(app, ["bench", "start", "--quick", "--dir", str(tmp_path)])
    assert result.exit_code == 0, "a claim that doesn't hold is a result, not a failure to measure"
    assert "warm_start_s" in result.stdout
    assert "NO" in result.stdout


def test_people_get_the_grid_of_a_model_with_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {}

    def measured(folder: Path, **options: object) -> Report:
        asked.update(options)
        cells = [Cell("decode", 1, 0, 12.34, 1, 10, 20), Cell("decode", 8, 0, None, 1, 3 * 10**9, 10**9)]
        return Report("model", (), tuple(cell.row() for cell in cells))

    monkeypatch.setattr(model, "bench_model", measured)
    arguments = ["--context", "0", "--sessions", "1", "--sessions", "8", "--latents", "q8", "--dir", str(tmp_path)]
    result = runner.invoke(app, ["bench", "model", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.stderr
    assert (asked["only_contexts"], asked["only_sessions"], asked["latents"]) == ([0], [1, 8], "q8")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["1", "12.3"] in lines
    assert "does not fit: 3.0 GB of states, 1.0 free" in result.stdout


def test_models_are_kept_below_the_cache_unless_told_otherwise(tmp_path: Path) -> None:
    assert bench_folder(None, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "serai" / "bench"
    assert bench_folder(tmp_path / "given", {}) == tmp_path / "given"
    (tmp_path / "file").write_text("")
    with pytest.raises(BadParameter, match="--dir is"):
        bench_folder(tmp_path / "file" / "under", {})
