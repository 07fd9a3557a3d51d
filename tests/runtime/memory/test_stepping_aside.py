"""A call that waits gives up what its session holds for those before it, and neither is the worse for it."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from serai.runtime import FinishReason, SamplingParams, Session
from serai.runtime.errors import SeraiError
from serai.runtime.memory import admission
from serai.runtime.memory.admission import Admission, Aside, Reservation
from serai.runtime.memory.beside import ids_bytes
from serai.runtime.services import Policy
from serai.runtime.state import StatePool, session_bytes
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import FIXED, LAYOUT, LOGITS, PAGE, greedy_by_hand

pytestmark = pytest.mark.anyio

LIMIT = 100_000


class Line:
    """60,000 of the bytes are taken; a first call waits for 50,000, and a later one that can step aside for 20,000."""

    def __init__(self) -> None:
        self.admission = Admission(StatePool(LAYOUT, limit_bytes=LIMIT))
        self.account = self.admission._pool.accounts.of("")
        self.asked = 0
        self.needed = 20_000
        self.got: dict[str, int] = {}

    async def enter(self, name: str, needed: int, aside: Aside | None = None) -> None:
        reservation: Reservation = await self.admission.enter(
            needed, account=self.account, held_bytes=0, going_on=False, aside=aside
        )
        self.got[name] = reservation.bytes
        reservation.close()


async def in_line(line: Line, aside: Aside) -> None:
    """Let both wait until nothing more happens, then give back what was taken, and let both be served."""
    taken = await line.admission.enter(60_000, account=line.account, held_bytes=0, going_on=False)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(line.enter, "first", 50_000)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(line.enter, "later", line.needed, aside)
            await anyio.wait_all_tasks_blocked()
            line.admission.freed()
            await anyio.wait_all_tasks_blocked()
            taken.close()


async def test_another_sessions_trouble_is_not_told_to_who_asks_for_memory() -> None:
    line = Line()

    async def fails(is_called: Callable[[], bool]) -> bool:
        line.asked += 1
        raise SeraiError("the store is full")

    await in_line(line, Aside(fails, lambda: line.needed, LIMIT))
    assert line.asked > 0
    assert line.got == {"first": 50_000, "later": 20_000}


async def test_what_is_given_up_is_needed_from_then_on_whatever_becomes_of_the_rest() -> None:
    """It was known only when all was given up, and whoever was called meanwhile took too little memory."""
    line = Line()
    never = anyio.Event()

    async def lets_go_and_is_slow(is_called: Callable[[], bool]) -> bool:
        line.asked += 1
        line.needed = 45_000
        with anyio.move_on_after(0.05):
            await never.wait()
        raise SeraiError("the store is full")

    await in_line(line, Aside(lets_go_and_is_slow, lambda: line.needed, LIMIT))
    assert line.asked > 0
    assert line.got == {"first": 50_000, "later": 45_000}


async def test_nobody_gives_up_what_could_never_be_had_back() -> None:
    line = Line()

    async def steps(is_called: Callable[[], bool]) -> bool:
        line.asked += 1
        return False

    await in_line(line, Aside(steps, lambda: line.needed, LIMIT + 1))
    assert line.asked == 0
    assert line.got == {"first": 50_000, "later": 20_000}


async def test_a_generation_steps_aside_for_one_that_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both grew until neither could go on beside the other, and the first to find out ended without memory."""
    monkeypatch.setattr(admission, "BETWEEN_TOKENS_S", 10.0)  # however busy the machine is
    prompts, count = ([1] * 40, [2] * 40), 60
    longest = session_bytes(LAYOUT, 40 + count)
    limit = longest + session_bytes(LAYOUT, 60) + FIXED + LOGITS + PAGE + 2 * ids_bytes(40 + count)
    said: dict[int, tuple[int, ...]] = {}
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=Policy(reuse=False, guess=False)) as rt:

        async def speak(number: int, session: Session) -> None:
            completion = await session.generate(SamplingParams(temperature=0, max_tokens=count)).collect()
            assert completion.finish_reason is FinishReason.LENGTH
            said[number] = completion.tokens

        sessions = [await rt.session(), await rt.session()]
        for session, prompt in zip(sessions, prompts, strict=True):
            await session.append(prompt)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number, session in enumerate(sessions):
                    tasks.start_soon(speak, number, session)
        moves = rt.status().work.demotions
        rt.check()
    assert said == {number: tuple(greedy_by_hand(prompt, count)) for number, prompt in enumerate(prompts)}
    assert 1 <= moves <= 3, "who has stepped aside waits for the other's end, not for its next token"


async def test_a_generation_waits_for_one_that_is_between_two_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused at once, though the other came back in a moment and stepped aside."""
    monkeypatch.setattr(admission, "BETWEEN_TOKENS_S", 10.0)
    limit = 2 * (session_bytes(LAYOUT, 41) + ids_bytes(80)) + FIXED + LOGITS
    params = SamplingParams(temperature=0, max_tokens=30)
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=Policy(reuse=False, guess=False)) as rt:
        one, other = await rt.session(), await rt.session()
        for session in (one, other):
            await session.append([1] * 40)
        reading, resting = one.generate(params), other.generate(params)
        taken, rested = [(await anext(reading)).id], [(await anext(resting)).id]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:

                async def read_on() -> None:
                    taken.extend([token.id async for token in reading])

                tasks.start_soon(read_on)
                while not rt.status().work.waiting_for_memory:  # noqa: ASYNC110  # nobody says so
                    await anyio.sleep(0.001)
                await anyio.wait_all_tasks_blocked()
                rested.extend([token.id async for token in resting])
        assert taken == rested == greedy_by_hand([1] * 40, 30)
        rt.check()
