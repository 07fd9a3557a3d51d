"""`Session.migrate` while a reader has a stream open: it is held between two tokens, and ends or goes on."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from serai.checkpoints.moving.handover import StorePeer
from serai.runtime import FinishReason, Generation, Runtime, SamplingParams, Session
from serai.runtime.errors import NotOwner, SessionBusy, SessionClosed, StoreBusy, StoreFull
from serai.runtime.memory.residency import Tier
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import ScriptedModel

pytestmark = pytest.mark.anyio

SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=24, repetition_penalty=1.3, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = [1, 2, 3, 4, 5]


async def begun(rt: Runtime, params: SamplingParams, prompt: list[int] = PROMPT) -> tuple[Session, list[int]]:
    """A session that has read the prompt, and what it says if nothing disturbs it."""
    session = await rt.session()
    await session.append(prompt)
    twin = await session.twin()
    expected = list((await twin.generate(params).collect()).tokens)
    await twin.close()
    return session, expected


async def take(stream: Generation, count: int) -> list[int]:
    return [(await anext(stream)).id for _ in range(count)]


async def rest_there(store: Path, session: Session, params: SamplingParams, given: list[int]) -> list[int]:
    left = SamplingParams.from_record({**params.to_record(), "max_tokens": params.max_tokens - len(given)})
    async with fake_runtime(store=store) as rt:
        came = await rt.resume(session.id)
        assert came.tokens().tolist() == [*PROMPT, *given]
        assert rt.counters.prefilled_tokens == 0
        return list((await came.generate(left).collect()).tokens)


class SlowPeer:
    """Holds the content of a move up until it is told to let it go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()
        receive = StorePeer.receive

        def slow(*arguments: Any) -> Any:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._go_on.wait(30), "the test lets it go on"
            if fails:
                raise StoreFull(path="there", doing="receiving")
            return receive(*arguments)

        monkeypatch.setattr(StorePeer, "receive", slow)

    def go_on(self) -> None:
        self._go_on.set()


async def test_a_stream_ends_where_its_session_moves_on(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "here") as rt:
        session, expected = await begun(rt, SAMPLED)
        stream = session.generate(SAMPLED)
        given = await take(stream, 7)
        point = await session.migrate(tmp_path / "there")
        assert point.position == len(PROMPT) + 7
        assert [token async for token in stream] == []
        assert (stream.finish_reason, session.doing) == (FinishReason.MOVED, None)
        with pytest.raises(SessionClosed, match="moved"):
            await session.append([1])
        await stream.aclose()
        rt.check()
    assert given + await rest_there(tmp_path / "there", session, SAMPLED, given) == expected


async def test_a_token_that_is_being_computed_is_handed_out_first(tmp_path: Path) -> None:
    model = ScriptedModel()
    async with fake_runtime(model, store=tmp_path / "here") as rt:
        session, expected = await begun(rt, SAMPLED)
        stream = session.generate(SAMPLED, guess=False)
        given = await take(stream, 5)
        gate = model.before_layer = Gate(step=1)
        reading = asyncio.ensure_future(stream.collect())
        await gate.reached.wait()
        moving = asyncio.ensure_future(session.migrate(tmp_path / "there"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not moving.done()
        assert session.is_open
        gate.open()
        assert (await moving).position == len(PROMPT) + 6
        done = await reading
        given += done.tokens
        assert (given, done.finish_reason) == (expected[:6], FinishReason.MOVED)
    assert given + await rest_there(tmp_path / "there", session, SAMPLED, given) == expected


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("guess", [False, True])
async def test_a_stream_goes_on_when_the_move_fails(tmp_path: Path, guess: bool, params: SamplingParams) -> None:
    """Between any two tokens, those of a batch that was guessed right among them."""
    model = ScriptedModel(counting=True)
    async with fake_runtime(model, store=tmp_path / "here") as rt, fake_runtime(store=tmp_path / "there"):
        session, expected = await begun(rt, params, [*range(3, 16), *range(3, 16), 3])
        stream = session.generate(params, guess=guess)
        given: list[int] = []
        async for token in stream:
            given.append(token.id)
            if token.finish_reason is None:
                with pytest.raises(StoreBusy):
                    await session.migrate(tmp_path / "there")
                assert session.doing == "generate"
        assert given == expected
        assert stream.finish_reason is FinishReason.LENGTH
        assert session.position == 27 + 24
        await session.migrate(tmp_path / "elsewhere")


async def test_whoever_asks_or_leaves_meanwhile_waits_for_the_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path / "here") as rt:
        session, expected = await begun(rt, SAMPLED)
        peer = SlowPeer(monkeypatch)
        stream = session.generate(SAMPLED)
        given = await take(stream, 3)
        moving = asyncio.ensure_future(session.migrate(tmp_path / "there"))
        await peer.reached.wait()
        assert session.doing == "migrate"
        asking = asyncio.ensure_future(anext(stream, None))
        leaving = asyncio.ensure_future(stream.aclose())
        for call in (session.migrate(tmp_path / "third"), session.append([1]), session.pause()):
            with pytest.raises(SessionBusy, match="busy with migrate"):
                await call
        fork = await session.fork()
        await anyio.sleep(0.01)
        assert not asking.done()
        assert not leaving.done()
        assert not await session.demote()
        assert session.tier is Tier.HOT
        peer.go_on()
        await moving
        await leaving
        assert await asking is None
        assert stream.finish_reason is FinishReason.MOVED
        assert fork.position == len(PROMPT) + 3
        await fork.close()
        rt.check()
    assert given + await rest_there(tmp_path / "there", session, SAMPLED, given) == expected


async def test_who_is_cancelled_while_leaving_has_left_when_the_move_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session stayed busy with a stream that nobody read, for as long as anybody kept it."""
    async with fake_runtime(store=tmp_path / "here") as rt:
        session, _ = await begun(rt, SAMPLED)
        peer = SlowPeer(monkeypatch, fails=True)
        stream = session.generate(SAMPLED)
        given = await take(stream, 3)
        moving = asyncio.ensure_future(session.migrate(tmp_path / "there"))
        await peer.reached.wait()
        with anyio.move_on_after(0.01):
            await stream.aclose()
        peer.go_on()
        with pytest.raises(StoreFull):
            await moving
        assert (stream.finish_reason, session.doing) == (FinishReason.CANCELLED, None)
        await session.append([1])
        assert session.tokens().tolist() == [*PROMPT, *given, 1]


async def test_a_stream_that_is_just_ending_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_runtime(store=tmp_path / "here") as rt:
        session, expected = await begun(rt, SAMPLED)
        stream = session.generate(SAMPLED, guess=False)
        given = await take(stream, 23)
        flush, flushing, go_on = session.record.flush, anyio.Event(), anyio.Event()

        async def slowly() -> None:
            if stream.finish_reason is not None:
                flushing.set()
                await go_on.wait()
            await flush()

        monkeypatch.setattr(session.record, "flush", slowly)
        reading = asyncio.ensure_future(stream.collect())
        await flushing.wait()
        moving = asyncio.ensure_future(session.migrate(tmp_path / "there"))
        await asyncio.sleep(0.01)
        go_on.set()
        assert [*given, *(await reading).tokens] == expected
        assert (await moving).position == len(PROMPT) + 24


async def test_a_move_that_is_cancelled_while_it_waits_holds_nothing(tmp_path: Path) -> None:
    model = ScriptedModel()
    async with fake_runtime(model, store=tmp_path / "here") as rt:
        session, expected = await begun(rt, SAMPLED)
        stream = session.generate(SAMPLED)
        given = await take(stream, 5)
        gate = model.before_layer = Gate(step=1)
        reading = asyncio.ensure_future(stream.collect())
        await gate.reached.wait()
        with anyio.move_on_after(0.01) as scope:
            await session.migrate(tmp_path / "there")
        assert scope.cancelled_caught
        gate.open()
        assert [*given, *(await reading).tokens] == expected
        assert session.doing is None
    assert not (tmp_path / "there").exists()


async def test_a_stream_that_ends_before_it_can_be_held_ends_as_it_would(tmp_path: Path) -> None:
    model = ScriptedModel()
    async with fake_runtime(model, store=tmp_path / "here") as rt:
        session, expected = await begun(rt, SAMPLED)
        stream = session.generate(SAMPLED, guess=False)
        given = await take(stream, 23)
        gate = model.before_layer = Gate(step=1)
        reading = asyncio.ensure_future(stream.collect())
        await gate.reached.wait()
        moving = asyncio.ensure_future(session.migrate(tmp_path / "there"))
        await asyncio.sleep(0)
        gate.open()
        done = await reading
        assert ([*given, *done.tokens], done.finish_reason) == (expected, FinishReason.LENGTH)
        assert (await moving).position == len(PROMPT) + 24
        with pytest.raises(NotOwner):
            await rt.resume(session.id)
