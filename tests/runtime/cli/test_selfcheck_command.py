"""`serai selfcheck`: a list of promises, and a failing exit when one is broken."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serai.runtime.cli.main import app
from tests.runtime.cli.test_eval import use_fake
from tests.runtime.fake_model import Flaw

runner = CliRunner()


@pytest.mark.parametrize(
    ("precision", "asked"),
    [
        ("exact", []),
        ("fast", []),
        ("fast", ["--trunk", "q8"]),
        ("fast", ["--trunk", "q4"]),
        ("exact", ["--latents", "q8"]),
        ("fast", ["--latents", "q8"]),
    ],
)
def test_a_model_keeps_every_promise(precision: str, asked: list[str], nano: Path) -> None:
    """B106, B14: mixed batches, threads, splits, forks and pauses give the bits of a lone run."""
    result = runner.invoke(app, ["selfcheck", str(nano), "--precision", precision, *asked, "--json"])
    assert result.exit_code == 0, (result.stdout, result.stderr)
    promises = json.loads(result.stdout)
    assert len(promises) == 9
    for promise in promises:
        assert set(promise) == {"promise", "cases", "held"}
        assert promise["cases"] == promise["held"] > 0


def test_a_broken_promise_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake(monkeypatch, Flaw.OLD_BUFFERS)
    result = runner.invoke(app, ["selfcheck", "fake"])
    assert result.exit_code == 1
    assert "promises were broken; first: " in result.stderr
    assert "leave no trace" in result.stdout
