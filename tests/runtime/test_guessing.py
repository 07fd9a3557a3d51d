"""Guessing changes no token: what is drawn, delivered and kept is the same with it and without."""

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.runtime import Runtime, SamplingParams
from serai.runtime.sampling.guessing import LEAST_PATTERN, LONGEST_PATTERN, MOST_GUESSES, PAYS, PLACES, Guesser
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import VOCAB, ScriptedModel

pytestmark = pytest.mark.anyio

PLAIN, GUESSING = Policy(reuse=False, guess=False), Policy(reuse=False, guess=True)
COUNTED = [*range(3, VOCAB)] * 3
CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=60),
    "sampled with penalties": SamplingParams(temperature=0.7, seed=5, presence_penalty=0.4, max_tokens=60),
    "a stop token among the guesses": SamplingParams(temperature=0, stop_token_ids=[9], max_tokens=60),
    "held off stopping": SamplingParams(temperature=0, stop_token_ids=[9], min_tokens=20, max_tokens=60),
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
    assert len(guesser.guess(99)) <= MOST_GUESSES


def test_each_try_that_finds_nothing_asks_for_a_longer_pattern() -> None:
    guesser = Guesser(np.array([1, 2, 3] * 80, dtype=np.int32))
    sizes = []
    while guesser.guess(4):
        sizes.append(guesser._pattern)
        guesser.was_right(0)
        if sizes[-1] == LONGEST_PATTERN:
            break
    assert sizes == [3, 6, 12, 24, 48, LONGEST_PATTERN]
    guesser.was_right(1)
    assert guesser._pattern == LONGEST_PATTERN, "one right guess is no loss and no gain"
    guesser.was_right(PAYS)
    assert guesser._pattern == LEAST_PATTERN


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_a_text_without_repetition_pays_for_few_tries(seed: int, vocab: int) -> None:
    """Patterns that occur by chance, and never the same token after them twice running."""
    ids = np.random.default_rng(seed).integers(0, vocab, 512).astype(np.int32)
    guesser = Guesser(ids[:128])
    tries = 0
    for token in ids[128:].tolist():
        if guesser.guess(8):
            guesser.was_right(0)
            tries += 1
        guesser.push(token)
    assert tries <= 6


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_a_guess_follows_the_latest_place_that_looks_like_the_end(ids: list[int], most: int) -> None:
    guesser = Guesser(np.array(ids, dtype=np.int32))
    places = [end for end in range(3, len(ids)) if ids[end - 3 : end] == ids[-3:]]
    expected = ids[places[-1] : places[-1] + min(most, MOST_GUESSES)] if places else []
    found = guesser.guess(most)
    assert found == expected or (len([one for one in range(len(ids)) if ids[one] == ids[-1]]) > PLACES and not found)
