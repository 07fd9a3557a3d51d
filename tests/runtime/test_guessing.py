"""Guessing changes no token: what is drawn, delivered and kept is the same with it and without."""

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.runtime import Runtime, SamplingParams
from serai.runtime.sampling.guessing import (
    CHECKED,
    LEAST_PATTERN,
    LONGEST_PATTERN,
    PLACES,
    Guesser,
    Worth,
    tail_beyond,
)
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.sessions.elsewhere import said_elsewhere
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import VOCAB, ScriptedModel

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a guess is tried is for the clock to say; here what comes of it counts, and always has to come."""
    monkeypatch.setattr(Worth, "guesses", property(lambda self: 8 if self.step_s else 0))


PLAIN, GUESSING = Policy(reuse=False, guess=False), Policy(reuse=False, guess=True)
COUNTED = [*range(3, VOCAB)] * 3
CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=60),
    "sampled with penalties": SamplingParams(temperature=0.7, seed=5, presence_penalty=0.4, max_tokens=60),
    "a stop token among the guesses": SamplingParams(temperature=0, stop_token_ids=[9], max_tokens=60),
    "held off stopping": SamplingParams(temperature=0, stop_token_ids=[9], min_tokens=20, max_tokens=60),
    "a stop token that is guessed at once": SamplingParams(temperature=0, stop_token_ids=[4], max_tokens=60),
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "logprobs": SamplingParams(temperature=0.5, seed=1, logprobs=2, max_tokens=30),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [256, 6])
async def test_the_tokens_are_the_same_with_guesses_and_without(name: str, rows: int) -> None:
    found = []
    for policy in (PLAIN, GUESSING):
        limits = Limits(rows, rows)
        async with fake_runtime(ScriptedModel(counting=True), policy=policy, limits=limits) as rt:
            session = await rt.session()
            await session.append(COUNTED)
            tokens = [token async for token in session.generate(CASES[name])]
            found.append((tokens, session.tokens().tolist(), (await session.logits()).tolist()))
            if policy is GUESSING and name == "greedy" and rows == 256:
                assert rt.counters.right_guesses > 45
                assert rt.counters.steps < 25
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", [PLAIN, GUESSING])
@pytest.mark.parametrize("guess", [None, False, True])
async def test_a_generation_says_whether_it_is_guessed(policy: Policy, guess: bool | None) -> None:
    async with fake_runtime(ScriptedModel(counting=True), policy=policy) as rt:
        session = await rt.session()
        await session.append(COUNTED)
        await session.generate(CASES["greedy"], guess=guess).collect()
        assert (rt.counters.guessed_tokens > 0) == (policy.guess if guess is None else guess)


async def test_leaving_in_the_middle_of_a_batch_keeps_what_was_handed_out() -> None:
    """B48: never the undelivered rest, though the engine has read it already."""
    async with fake_runtime(ScriptedModel(counting=True), policy=GUESSING) as rt:
        for count in range(1, 14):
            session = await rt.session()
            await session.append(COUNTED)
            given = []
            async for token in session.generate(CASES["greedy"]):
                given.append(token.id)
                if len(given) == count:
                    break
            assert session.tokens().tolist() == COUNTED + given
            assert session.position == len(COUNTED) + count
            fork = await session.fork()
            rest = (await fork.generate(CASES["greedy"]).collect()).tokens
            assert [*given, *rest][:40] == [3 + index % (VOCAB - 3) for index in range(40)]
            await session.append([3])
            await session.close()


async def test_sessions_that_guess_side_by_side_keep_to_themselves() -> None:
    async with fake_runtime(ScriptedModel(counting=True), policy=GUESSING, limits=Limits(12, 12)) as rt:

        async def one(rt: Runtime, start: int) -> None:
            session = await rt.session()
            await session.append([*COUNTED, *range(3, 3 + start)])
            done = await session.generate(SamplingParams(temperature=0, max_tokens=30)).collect()
            assert list(done.tokens) == [3 + (start + index) % (VOCAB - 3) for index in range(30)]

        async with anyio.create_task_group() as tasks:
            for start in range(1, 8):
                tasks.start_soon(one, rt, start)


def test_a_guess_is_what_followed_the_last_time() -> None:
    guesser = Guesser(np.array([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 1, 2], dtype=np.int32))
    assert guesser.guess(4) == []
    guesser.push(3)
    assert guesser.guess(4) == [7, 8, 1, 2]
    assert guesser.guess(1) == [7]
    assert guesser.guess(0) == []


def test_the_place_that_has_more_in_common_with_the_end_is_followed_not_the_latest() -> None:
    guesser = Guesser(np.array([9, 8, 1, 2, 3, 4, 5, 7, 1, 2, 3, 6, 6, 9, 8, 1, 2, 3], dtype=np.int32))
    assert guesser.guess(2) == [4, 5]
    assert guesser.guess(2, pattern=5) == [4, 5]
    assert guesser.guess(2, pattern=6) == []


def test_what_repeats_itself_is_guessed_to_go_on() -> None:
    guesser = Guesser(np.array([1, 2, 3, 4, 5, 4, 5, 4, 5], dtype=np.int32))
    assert guesser.guess(5) == [4, 5, 4, 5, 4]


def test_a_text_says_by_itself_how_much_must_repeat_before_it_is_guessed() -> None:
    rng = np.random.default_rng(3)
    words = rng.integers(0, 8000, 4, dtype=np.int32)
    assert Guesser(np.tile(words, 32)).least_pattern() == LEAST_PATTERN
    assert Guesser(rng.integers(0, 8000, 200, dtype=np.int32)).least_pattern() == LEAST_PATTERN, "it says nothing"
    for _ in range(10):
        assert Guesser(rng.choice(words, 200)).least_pattern() > 2 * LEAST_PATTERN
    for short in range(LEAST_PATTERN + 2):
        assert Guesser(np.zeros(short, dtype=np.int32)).least_pattern() == LEAST_PATTERN


@given(st.lists(st.integers(0, 2), max_size=70), st.integers(0, 40))
def test_how_much_must_repeat_is_what_would_have_been_right_so_far(ids: list[int], tail: int) -> None:
    ids = [*ids, *ids[:tail]]

    def latest(end: int, pattern: int) -> int | None:
        places = (place for place in range(end - 1, pattern - 1, -1))
        return next((place for place in places if ids[place - pattern : place] == ids[end - pattern : end]), None)

    pattern = LEAST_PATTERN
    while pattern < LONGEST_PATTERN:
        ends = range(max(len(ids) - CHECKED, pattern + 1), len(ids))
        tried = [(place, end) for end in ends if (place := latest(end, pattern)) is not None]
        right = sum(ids[place] == ids[end] for place, end in tried)
        if 2 * right > len(tried) + 1 or (not tried and pattern == LEAST_PATTERN):
            break
        pattern *= 2
        if not tried:
            break
    assert Guesser(np.array(ids, dtype=np.int32)).least_pattern() == pattern


def test_a_guess_may_follow_another_text_but_never_beyond_its_end() -> None:
    others = [np.array([1, 2, 3, 7, 8], dtype=np.int32), np.array([4, 5, 6, 9], dtype=np.int32)]
    guesser = Guesser(np.array([0, 1, 2, 3], dtype=np.int32), others)
    assert guesser.guess(8) == [7, 8]
    for token in (4, 5, 6):
        guesser.push(token)
    assert guesser.guess(8) == [9]
    assert Guesser(np.array([7, 8], dtype=np.int32), others).guess(8) == [], "the end of one and its own beginning"


def test_another_text_counts_from_where_it_leaves_this_one() -> None:
    ids = np.arange(200, dtype=np.int32)
    other = np.concatenate([ids[:150], np.arange(900, 950, dtype=np.int32)])
    tail = tail_beyond(other, ids, 10)
    assert tail.tolist() == [*range(150 - LONGEST_PATTERN, 150), *range(900, 910)]
    assert tail_beyond(ids[:100], ids, 10).size == 0
    assert tail_beyond(ids, ids[:100], 10).tolist() == [*range(100 - LONGEST_PATTERN, 110)]


@given(
    st.lists(st.integers(0, 2), min_size=3, max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(3, 12)
)
def test_what_was_looked_for_in_vain_is_found_once_it_is_there(start: list[int], more: list[int], pattern: int) -> None:
    watching = Guesser(np.array(start, dtype=np.int32))
    for length in range(len(start), len(start) + len(more) + 1):
        ids = [*start, *more][:length]
        asked = pattern if length % 5 else LEAST_PATTERN
        assert watching.guess(4, pattern=asked) == Guesser(np.array(ids, dtype=np.int32)).guess(4, pattern=asked)
        if length < len(start) + len(more):
            watching.push(more[length - len(start)])


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9), st.integers(3, 6))
def test_a_guess_follows_the_longest_likeness_the_latest_of_several(ids: list[int], most: int, pattern: int) -> None:
    def alike(end: int) -> int:
        return next((n for n in range(end) if ids[end - 1 - n] != ids[-1 - n]), end)

    places = [end for end in range(LEAST_PATTERN, len(ids)) if alike(end) >= pattern][-PLACES:]
    best = max(places, key=lambda end: (alike(end), end), default=None)
    expected: list[int] = []
    if best is not None and alike(best) >= pattern:
        followed = ids[best : best + most]
        expected = [followed[index % len(followed)] for index in range(most)]
    assert Guesser(np.array(ids, dtype=np.int32)).guess(most, pattern=pattern) == expected


async def test_what_was_taken_back_and_what_a_fork_has_said_is_guessed_again() -> None:
    async with fake_runtime(policy=GUESSING) as rt:
        session = await rt.session()
        await session.append([5, 1, 8])
        fork = await session.fork()
        said = (await session.generate(CASES["greedy"]).collect()).tokens
        for again in (session, fork):
            if again is session:
                await session.rewind(position=3)
            before = rt.counters.right_guesses
            assert (await again.generate(CASES["greedy"]).collect()).tokens == said
            assert rt.counters.right_guesses - before > 45
        stranger = await rt.session()
        await stranger.append([5, 1, 8])
        everybody = [session, fork, stranger]
        assert said_elsewhere(stranger, everybody, stranger.tokens()) == [], "another tree is none of its business"
