"""The monitor over a real server that is killed and started again."""

import signal
import tempfile
from pathlib import Path

import anyio
import pytest

from serai.runtime.monitor.http_source import HttpSource
from tests.runtime.monitor.scripted import screen, watching
from tests.runtime.server.started import started

pytestmark = pytest.mark.anyio


async def test_a_server_that_is_killed_and_started_again_is_found_again(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket is short
        address = f"unix:{folder}/s"
        arguments = ("nano", "--store", tmp_path / "store", "--host", address)
        with started(*arguments, cwd=tmp_path) as (_, process):
            async with watching(HttpSource(address)) as (app, pilot):
                await app.poll()
                await pilot.pause()
                assert "● live" in screen(app)[0]
                process.send_signal(signal.SIGKILL)
                process.wait()
                await app.poll()
                await pilot.pause()
                assert "✗ lost" in screen(app)[0]
                with started(*arguments, cwd=tmp_path):
                    with anyio.fail_after(30):
                        while "● live" not in screen(app)[0]:
                            await app.poll()
                            await pilot.pause()
                    assert [entry.what for entry in app.model.log][:2] == ["connection lost", "connected again"]
