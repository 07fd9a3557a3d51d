"""Whether guessing pays is measured by the clock, session by session; what it may lose is bounded."""

import pytest

from serai.runtime import SamplingParams
from serai.runtime.sampling.guessing import (
    EARNED,
    FIRST_CREDIT,
    LEAST_GUESSES,
    LEAST_PATTERN,
    LONGEST_PATTERN,
    MOST_GUESSES,
    Worth,
)
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import VOCAB, ScriptedModel

pytestmark = pytest.mark.anyio


def generate(worth: Worth, tokens: int, *, right: int, row: float, offered: int = MOST_GUESSES) -> tuple[float, int]:
    """The time that so many tokens take when that many guesses of each try are right, and the number of tries.

    A step of one row takes 1, and `row` for every further one.
    """
    spent, done, tries = 0.0, 0, 0
    while done < tokens:
        guesses = min(worth.guesses, offered)
        if guesses == 0:
            worth.plain(1.0)
            spent, done = spent + 1.0, done + 1
            continue
        tries += 1
        known, first = min(right, guesses), 1.0 + guesses * row
        if known == guesses:
            worth.tried(guesses, known, guesses + 1, first, first_s=first)
            spent, done = spent + first, done + guesses + 1
        else:
            seconds = first + 1.0 + (known + 1) * row
            worth.tried(guesses, known, known + 2, seconds, first_s=first)
            spent, done = spent + seconds, done + known + 2
    return spent, tries


@pytest.mark.parametrize("row", [0.02, 0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("tokens", [128, 256, 10_000])
def test_where_guessing_never_pays_it_costs_no_more_than_was_set_aside(row: float, tokens: int) -> None:
    spent, tries = generate(Worth(), tokens, right=0, row=row)
    first_try, later_ones = 8 * row, 4 * row + 1  # the last try may bring one token more than were asked for
    assert spent - tokens <= max(first_try, FIRST_CREDIT + later_ones) + 2 * EARNED * tokens
    assert tries >= tokens * EARNED / 4, "it is tried again, now and then"


def test_where_a_guess_is_right_as_often_as_chance_has_it_nothing_is_lost() -> None:
    """One right, then a wrong one, with rows so dear that this does not pay."""
    spent, _ = generate(Worth(), 5_000, right=1, row=0.9)
    assert spent <= 1.02 * 5_000


def test_a_first_step_that_was_slow_does_not_make_losses_look_like_gains() -> None:
    worth = Worth()
    worth.plain(20.0)
    spent, _ = generate(worth, 1_000, right=0, row=0.2)
    assert worth.step_s == pytest.approx(1.0, rel=0.1)
    assert spent <= 1.02 * 1_000


def test_what_copies_is_guessed_ever_further_and_what_pays_again_is_taken_up_again() -> None:
    worth = Worth()
    spent, _ = generate(worth, 256, right=MOST_GUESSES, row=0.05)
    assert worth.guesses == MOST_GUESSES
    assert spent < 256 / 8
    generate(worth, 1_000, right=0, row=0.05)
    assert worth.guesses in (0, LEAST_GUESSES)
    assert worth.pattern == LONGEST_PATTERN
    generate(worth, 2_000, right=MOST_GUESSES, row=0.05)
    assert worth.guesses == MOST_GUESSES
    assert worth.pattern == LEAST_PATTERN


def test_rows_that_cost_as_much_as_steps_are_worth_few_guesses() -> None:
    dear, cheap = Worth(), Worth()
    for worth, row in ((dear, 0.6), (cheap, 0.02)):
        generate(worth, 500, right=3, row=row)
    worth.plain(1.0)
    assert dear.guesses <= LEAST_GUESSES < cheap.guesses


def test_a_step_that_had_to_wait_for_somebody_else_proves_nothing() -> None:
    worth = Worth()
    worth.plain(1.0)
    worth.tried(4, 4, 5, 1_000.0, first_s=1_000.0)
    worth.plain(1_000.0)
    assert worth.step_s < 2.0
    assert worth.credit >= -2.0
    assert worth.row < 0.5


async def test_guessing_is_measured_where_it_happens() -> None:
    """A session that copies finds by the clock that guessing pays, and its forks know it too."""
    async with fake_runtime(ScriptedModel(counting=True), policy=Policy(reuse=False)) as rt:
        session = await rt.session()
        await session.append([*range(3, VOCAB)] * 3)
        assert session.worth.step_s == 0.0
        await session.generate(SamplingParams(temperature=0, max_tokens=200)).collect()
        assert session.worth.step_s > 0.0
        assert rt.counters.right_guesses > 0
        fork = await session.fork()
        assert fork.worth == session.worth
        assert fork.worth is not session.worth
