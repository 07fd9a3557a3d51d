"""Scenarios from the field: clients who leave, cancellations that meet, and shutting down meanwhile."""

import asyncio
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.checkpoints.store import Store
from serai.runtime import SamplingParams, Session
from serai.runtime.errors import (
    SessionClosed,
    ShuttingDown,
)
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import (
    GREEDY,
    ScriptedModel,
    greedy_by_hand,
    hash_of,
    logits_of,
)

pytestmark = pytest.mark.anyio


KEEPING = Policy(reuse=True, snapshot_every=16, save_after_tokens=4)


async def equals_cold(session: Session, ids: list[int]) -> bool:
    same_ids = session.tokens().tolist() == ids
    return same_ids and bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


@pytest.mark.parametrize("left", ["broken off", "cancelled"])
async def test_a_client_who_leaves_keeps_exactly_what_was_delivered(left: str) -> None:
    """B48: three delivered, and the next turn comes at once."""
    async with fake_runtime(policy=Policy(reuse=False, guess=True)) as rt:
        session = await rt.session()
        await session.append([5, 6])
        given: list[int] = []
        stream = session.generate(GREEDY)
        if left == "broken off":
            async for token in stream:
                given.append(token.id)
                if len(given) == 3:
                    break
            await stream.aclose()
        else:
            with anyio.CancelScope() as scope:
                async for token in stream:
                    given.append(token.id)
                    if len(given) == 3:
                        scope.cancel()
            await stream.aclose()
        await session.append([1])
        assert given == greedy_by_hand([5, 6], 3)
        assert await equals_cold(session, [5, 6, *given, 1])
        assert session.turn == 1
        rt.check()


async def test_cancelled_twice_while_the_first_is_being_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B105: the clean-up waits for the store, is cancelled again, and everything is free all the same."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([5, 6])
        begun, go_on = asyncio.Event(), threading.Event()
        loop, record = asyncio.get_running_loop(), Store.record

        def slow(store: Store, *arguments: object) -> object:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(timeout=10)
            return record(store, *arguments)  # type: ignore[arg-type]  # whatever the runtime calls it with

        stream = session.generate(SamplingParams(temperature=0, max_tokens=1_000))
        given = [(await anext(stream)).id for _ in range(3)]
        monkeypatch.setattr(Store, "record", slow)
        leaving = asyncio.ensure_future(stream.aclose())
        await begun.wait()
        for _ in range(2):
            leaving.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert session.doing is None
        assert await equals_cold(session, [5, 6, *given])
        rt.check()
    async with fake_runtime(store=tmp_path) as rt:
        assert await equals_cold(await rt.resume(session.id), [5, 6, *given])


async def test_shutting_down_while_a_generation_is_cleaned_up_leaves_nothing(tmp_path: Path) -> None:
    """B105: the fake runtime itself checks that every buffer came back and that the store can be opened again."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([5, 6])
        stream = session.generate(SamplingParams(temperature=0, max_tokens=1_000))
        given = [(await anext(stream)).id for _ in range(3)]
        leaving = asyncio.ensure_future(stream.aclose())
        await asyncio.sleep(0)
    await asyncio.gather(leaving, return_exceptions=True)
    with pytest.raises(SessionClosed):
        await session.append([1])
    async with fake_runtime(store=tmp_path) as rt:
        ids = (await rt.resume(session.id)).tokens().tolist()
        assert ids == [5, 6, *given]


@pytest.mark.parametrize("call", ["append", "generate", "rewind", "hot"])
async def test_shutting_down_in_the_middle_of_a_step_leaves_nothing(tmp_path: Path, call: str) -> None:
    """B105: the step comes back to a session that is gone; the fake runtime checks that its memory came back."""
    gate = Gate(step=4 if call != "rewind" else 3)
    async with fake_runtime(ScriptedModel(before_layer=gate), store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append([5, 6])
        await session.append([7])
        given: list[int] = []
        stream = session.generate(GREEDY)

        async def read() -> None:
            async for token in stream:
                given.append(token.id)

        async def work() -> None:
            if call == "append":
                await session.append([8])
                await session.append([1] * 9)
            elif call == "generate":
                await read()
            elif call == "rewind":
                await session.rewind(position=1)
            else:
                await session.append([8])
                await session.demote()
                await session.append([1])

        working = asyncio.ensure_future(work())
        await gate.reached.wait()
        asyncio.get_running_loop().call_later(0.01, gate.open)
    outcome = (await asyncio.gather(working, return_exceptions=True))[0]
    assert outcome is None or isinstance(outcome, SessionClosed | ShuttingDown)
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        again = (await rt.resume(session.id)).tokens().tolist()
        assert again[: 3 + len(given)] == [5, 6, 7, *given]
