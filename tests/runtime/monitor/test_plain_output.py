"""Where no screen can be drawn: tables, lines and JSON."""

import json
import sys

import anyio
import pytest
from typer.testing import CliRunner

from serai.runtime.cli.main import app
from serai.runtime.monitor.plain_output import snapshot_text, status_line, stream
from serai.runtime.monitor.reading import status_from_json
from tests.runtime.monitor.scripted import Scripted, session, status

runner = CliRunner()


def test_a_snapshot_has_sessions_and_budget_and_nothing_but_text() -> None:
    """B110."""
    text = snapshot_text(status([session("a", label="\x1b[31m[/bold]\u202e")]), "here")
    assert "␛[31m[/bold]\\u202e" in text
    assert "budget       16 GB" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_a_line_tells_the_runtime() -> None:
    assert status_line(status()) == (
        "nano fast: 5 sessions, 2 busy, 1 cold; 252 tok/s; 12.9 GB of 16 GB; 0 waiting for memory"
    )


@pytest.mark.anyio
@pytest.mark.parametrize("as_json", [False, True])
async def test_lines_go_on_over_a_lost_connection(as_json: bool) -> None:
    source = Scripted()
    lines = stream(source, every_s=0.0, as_json=as_json)
    first = await anext(lines)
    source.down = "gone"
    second = await anext(lines)
    source.down = None
    assert await anext(lines) == first
    if as_json:
        assert json.loads(second)["error"]["kind"] == "SourceUnreachable"
        assert status_from_json(json.loads(first)) == status()
    else:
        assert second == "scripted can't be watched: gone"
    await anyio.lowlevel.checkpoint()


def test_the_command_prints_once_as_a_table_or_an_object() -> None:
    shown = runner.invoke(app, ["monitor", "--demo", "--once"])
    assert shown.exit_code == 0, shown.stderr
    assert "planner" in shown.stdout
    told = runner.invoke(app, ["monitor", "--demo", "--once", "--json"])
    assert told.exit_code == 0, told.stderr
    assert len(json.loads(told.stdout)["sessions"]) == 12


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    result = runner.invoke(app, ["monitor", "http://127.0.0.1:9", "--once", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["kind"] == "SourceUnreachable"
    assert result.stderr.startswith("serai: http://127.0.0.1:9 can't be watched: ")


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "serai.runtime.monitor.http_source", raising=False)
    result = runner.invoke(app, ["monitor", "--once"])
    assert result.exit_code == 1
    assert result.stderr == (
        "serai: the monitor needs the package httpx; install it with: pip install 'serai[monitor]'\n"
    )
