"""Places that clients go on from: each is brought back once, whoever comes and goes meanwhile."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from serai.runtime import Session
from serai.runtime.chat import Cursor
from serai.runtime.server.ask import Setting
from serai.runtime.server.places import Place
from serai.runtime.server.sessions import Sessions
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio


async def test_a_waiting_client_who_leaves_does_not_let_a_place_be_resumed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1] * 20)
        point = await session.pause()
        monkeypatch.setattr(rt, "chat_format", lambda: None)  # nothing is rendered here
        sessions = Sessions(rt, keep_hot=8, unstored_ttl_s=60)
        place = Place(point.id, "", 20, Cursor(), Setting(), chain="", previous=None)
        resume, resumed = rt.resume, 0

        async def slowly(*given: Any, **named: Any) -> Session:
            nonlocal resumed
            await anyio.sleep(0.1)
            resumed += 1
            return await resume(*given, **named)

        monkeypatch.setattr(rt, "resume", slowly)

        async def go_on() -> None:
            fork, _ = await sessions.go_on(place)
            await fork.close()

        async with anyio.create_task_group() as tasks:
            leaves = anyio.CancelScope()

            async def come_and_go() -> None:
                with leaves:
                    await go_on()

            tasks.start_soon(come_and_go)
            await anyio.sleep(0.02)
            tasks.start_soon(go_on)
            await anyio.sleep(0.02)
            leaves.cancel()
            await anyio.sleep(0.02)
            tasks.start_soon(go_on)
        assert (resumed, sessions.parked) == (1, 1)
        await sessions.close()
        assert rt.status().sessions == ()
