"""A call that waits gives up what its session holds for those before it, and neither is the worse for it."""

from collections.abc import Callable

import anyio
import pytest

from serai.runtime.errors import SeraiError
from serai.runtime.memory.admission import Admission, Aside, Reservation
from serai.runtime.state import StatePool
from tests.runtime.scripted import LAYOUT

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
