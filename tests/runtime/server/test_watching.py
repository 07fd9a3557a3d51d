"""The monitor's own source, over the server's routes."""

from pathlib import Path

import httpx
import pytest

from serai.runtime.monitor.http_source import HttpSource
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused
from tests.runtime.server.client import serving_model
from tests.runtime.server.replies import ReplyModel

pytestmark = pytest.mark.anyio


async def test_a_monitor_reads_the_status_and_acts(tmp_path: Path) -> None:
    model = ReplyModel(lambda prompt: "</think><response>ok</response></message>!")
    async with serving_model(model, store=tmp_path / "s") as client:
        made = await client.post("/v1/responses", {"input": "hi"})
        transport = httpx.ASGITransport(client.app)
        async with HttpSource("http://server", transport=transport) as source:
            (session,) = (await source.status()).sessions
            assert await source.comparison()
            forked = await source.act(Action(ActionKind.FORK, session.id, "twin"))
            assert {one.label for one in (await source.status()).sessions} == {"", "twin"}
            assert forked.session_id is not None
            await source.act(Action(ActionKind.PAUSE, forked.session_id))
            assert (await source.export(session.id, tmp_path / "bundle")).message.startswith(
                f"{(tmp_path / 'bundle').stat().st_size:,} bytes"
            )
            await source.act(Action(ActionKind.PAUSE, session.id))
            on = {"input": "more", "previous_response_id": made["id"]}
            assert (await client.post("/v1/responses", on))["status"] == "completed", "a place is more than a session"
            with pytest.raises(ActionRefused):
                await source.act(Action(ActionKind.CANCEL, session.id))
            with pytest.raises(ActionRefused):
                await source.act(Action(ActionKind.FORK, "a" * 26))
