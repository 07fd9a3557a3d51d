"""Choosing tokens: against a slow definition, at the edges, and as a function of the arguments only."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from serai.runtime.errors import BadParameter, LogitsInvalid
from serai.runtime.sampling import sample as sampling
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sampling.random import child_branch, uniform
from serai.runtime.sampling.sample import Sampled, TokenCounts, sample

NOTHING = TokenCounts(0)
GREEDY = SamplingParams(temperature=0.0)

# Few distinct values, so that ties are the rule; -inf is a mask.
LOGITS = st.lists(st.sampled_from([-math.inf, -3.0, -1.0, -0.0, 0.0, 0.5, 0.75, 4.0]), min_size=1, max_size=40).filter(
    lambda values: max(values) > -math.inf
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 39, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    logit_bias=st.dictionaries(st.integers(0, 0), st.sampled_from([-100.0, 1.5, 100.0]), max_size=1),
    logprobs=st.sampled_from([None, 0, 3]),
)


@pytest.fixture(autouse=True)
def _warns_afresh() -> Iterator[None]:
    sampling._warn_of_non_finite.cache_clear()
    yield
    sampling._warn_of_non_finite.cache_clear()


def f32(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def draw(logits: NDArray[np.float32], params: SamplingParams, position: int = 0, **more: Any) -> Sampled:
    counts = more.pop("counts", TokenCounts(len(logits)))
    return sample(logits, params, counts, **({"seed": 7, "branch": 0, "position": position} | more))


def by_definition(
    logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], generated: list[int], chance: float
) -> int:
    """Everything sorted, one rule after another."""
    scores = logits.astype(np.float64)
    for token in {*prompt, *generated}:
        up = scores[token] > 0
        scores[token] = scores[token] / params.repetition_penalty if up else scores[token] * params.repetition_penalty
    scores = scores.astype(np.float32).astype(np.float64)
    for token, times in Counter(generated).items():
        scores[token] -= params.frequency_penalty * times + params.presence_penalty
    scores = scores.astype(np.float32).astype(np.float64)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    scores = scores.astype(np.float32).astype(np.float64)
    order = sorted((token for token in range(len(scores)) if scores[token] > -np.inf), key=lambda t: (-scores[t], t))
    if params.temperature == 0.0:
        return order[0]
    weights = np.exp((scores - scores.max()) / params.temperature)
    mass = float(weights.sum())
    if 0 < params.top_k < len(scores):
        order = order[: params.top_k]
        mass = float(weights[order].cumsum()[-1])
    kept, running = [], 0.0
    for token in order:
        if params.top_p < 1.0 and running >= params.top_p * mass:
            break
        kept.append(token)
        running += float(weights[token])
    if len(kept) < len(order):
        mass = running
    likely = [token for token in kept if weights[token] >= params.min_p]
    if len(likely) < len(kept):
        mass = float(weights[likely].cumsum()[-1])
    running = 0.0
    for token in likely:
        running += float(weights[token])
        if running > chance * mass:
            return token
    return next(token for token in reversed(likely) if weights[token] > 0)


@given(values=LOGITS, params=PARAMS, data=st.data())
def test_a_draw_is_that_of_the_definition(values: list[float], params: SamplingParams, data: st.DataObject) -> None:
    logits = f32(*values)
    ids = st.lists(st.integers(0, len(values) - 1), max_size=12)
    prompt, generated = data.draw(ids), data.draw(ids)
    counts = TokenCounts(len(values), prompt + generated, generation_start=len(prompt))
    seed = data.draw(st.integers(0, 2**64 - 1))
    before = logits.tobytes()
    drawn = sample(logits, params, counts, seed=seed, branch=5, position=9)
    assert drawn.token == by_definition(logits, params, prompt, generated, uniform(seed, 5, 9))
    assert logits.tobytes() == before
    assert drawn == sample(logits, params, counts, seed=seed, branch=5, position=9)


@given(values=LOGITS, params=PARAMS, seed=st.integers(0, 1000))
def test_how_many_candidates_are_fetched_changes_nothing(
    values: list[float], params: SamplingParams, seed: int
) -> None:
    logits = f32(*values)
    counts = TokenCounts(len(values))
    usual = sample(logits, params, counts, seed=seed, branch=0, position=0)
    for first, growth in ((1, 2), (3, 5)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "FIRST_CANDIDATES", first)
            patch.setattr(sampling, "CANDIDATES_GROWTH", growth)
            assert sample(logits, params, counts, seed=seed, branch=0, position=0) == usual


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0])
def test_a_large_vocabulary_draws_as_the_definition_does(spread: float) -> None:
    logits = (np.random.default_rng(1).standard_normal(20_011) * spread).astype(np.float32)
    for index, params in enumerate(
        (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=50, top_p=0.9), SamplingParams(min_p=0.02))
    ):
        drawn = draw(logits, params, index).token
        assert drawn == by_definition(logits, params, [], [], uniform(7, 0, index))


def test_frequencies_follow_the_filtered_distribution() -> None:
    logits = f32(2.0, 1.0, 0.0, 1.0, -1.0)
    params = SamplingParams(temperature=0.8, top_k=4, top_p=0.9)
    drawn = Counter(draw(logits, params, position).token for position in range(4000))
    weights = np.exp(logits[[0, 1, 3]].astype(np.float64) / 0.8)  # id 2 falls to top-p, id 4 to top-k
    assert set(drawn) == {0, 1, 3}
    for token, share in zip((0, 1, 3), weights / weights.sum(), strict=True):
        assert abs(drawn[token] / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert draw(f32(1, 3, 3, 2, 3), GREEDY).token == 1
    assert draw(f32(-0.0, 0.0), GREEDY).token == 0


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    logits = np.zeros(1000, np.float32)
    logits[900] = 1.0
    drawn = {draw(logits, SamplingParams(top_k=3, temperature=10.0), position).token for position in range(200)}
    assert drawn == {900, 0, 1}


def test_a_vanishing_temperature_is_greedy_without_an_overflow() -> None:
    for temperature in (5e-324, 1e-300, 1e-30):
        assert draw(f32(-3e38, 1, 3e38, 3e38), SamplingParams(temperature=temperature, top_k=1)).token == 2
        assert draw(f32(-3e38, 3e38, 1), SamplingParams(temperature=temperature)).token == 1


def test_an_endless_temperature_draws_evenly() -> None:
    drawn = {draw(f32(0, 50, -50), SamplingParams(temperature=1e300), position).token for position in range(60)}
    assert drawn == {0, 1, 2}


def test_the_draw_depends_on_seed_branch_and_position_and_on_nothing_else() -> None:
    """B96: three copies of a request differ, and come out the same again."""
    logits = np.zeros(500, np.float32)
    copies = [[draw(logits, SamplingParams(), p, branch=branch).token for p in range(8)] for branch in range(3)]
    again = [[draw(logits, SamplingParams(), p, branch=branch).token for p in range(8)] for branch in range(3)]
    assert copies == again
    assert len({tuple(copy) for copy in copies}) == 3
    assert copies[0] != [draw(logits, SamplingParams(), p, seed=8).token for p in range(8)]
    assert copies[0] != [draw(logits, SamplingParams(), p, branch=child_branch(0, 0)).token for p in range(8)]


def test_twenty_tokens_in_one_go_equal_ten_and_ten_from_rebuilt_counts() -> None:
    """B43, for the sampler's part: all it needs is in the token ids, the seed, the branch and the position."""
    rows = np.random.default_rng(3).standard_normal((20, 50)).astype(np.float32)
    params = SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    prompt = [4, 9, 4]

    def go_on(ids: list[int], tokens: int) -> list[int]:
        ids = list(ids)
        counts = TokenCounts(50, ids, generation_start=len(prompt))
        for _ in range(tokens):
            drawn = sample(rows[len(ids) - len(prompt)], params, counts, seed=7, branch=0, position=len(ids))
            counts.push(drawn.token)
            ids.append(drawn.token)
        return ids

    assert go_on(go_on(prompt, 10), 10) == go_on(prompt, 20)


def test_all_logits_invalid_is_an_error_and_never_a_token() -> None:
    """B10."""
    for values in ([math.nan] * 4, [math.nan, math.inf, -math.inf], [-math.inf] * 3):
        for params in (GREEDY, SamplingParams()):
            with pytest.raises(LogitsInvalid, match=f"none of the {len(values)} logits is finite"):
                draw(f32(*values), params)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("place", "value"), [(0, math.nan), (5, math.inf)])
def test_some_invalid_logits_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture, temperature: float, place: int, value: float
) -> None:
    """B11."""
    logits = f32(0, 1, 2, 3, 2, 1, 0, 1)
    logits[place] = value
    params = SamplingParams(temperature=temperature, logprobs=8)
    with caplog.at_level(logging.WARNING):
        drawn = [draw(logits, params, position) for position in range(50)]
    assert place not in {each.token for each in drawn}
    assert len({each.token for each in drawn}) >= (1 if temperature == 0.0 else 5)
    assert all(each.non_finite == 1 for each in drawn)
    assert len(caplog.records) == 1
    assert drawn[0].top_logprobs is not None
    assert sum(math.exp(each) for each in drawn[0].top_logprobs.values()) == pytest.approx(1.0)
    assert place not in drawn[0].top_logprobs


def test_minus_infinity_is_a_mask_and_no_cause_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logits = f32(-math.inf, 0, -math.inf, 0)
    with caplog.at_level(logging.WARNING):
        drawn = {draw(logits, SamplingParams(temperature=50.0), position).token for position in range(50)}
    assert drawn == {1, 3}
    assert caplog.text == ""


def test_banned_tokens_are_not_drawn_whatever_their_logit_or_bias() -> None:
    logits = f32(0, 9, 0, 0)
    for params in (GREEDY, SamplingParams(), SamplingParams(logit_bias={1: 100.0}), SamplingParams(top_k=1)):
        assert all(draw(logits, params, position, banned=(1,)).token != 1 for position in range(30))


def test_banning_every_finite_token_is_an_error() -> None:
    with pytest.raises(LogitsInvalid, match="banned"):
        draw(f32(1, 2, -math.inf), SamplingParams(), banned=(0, 1))


def test_penalties_act_on_what_they_say() -> None:
    """Repetition: all ids, by factor. Presence: once. Frequency: each time, and only since the last append."""
    logits = f32(2, -2, 0, 0)
    counts = TokenCounts(4, [0, 1, 2, 3, 3], generation_start=2)

    def adjusted(**knobs: float) -> list[float]:
        params = SamplingParams(**knobs)  # type: ignore[arg-type]
        return [float(score) for score in sampling._adjusted(logits, params, counts, ())]

    assert adjusted(repetition_penalty=2.0) == [1.0, -4.0, 0.0, 0.0]
    assert adjusted(presence_penalty=0.5) == [2.0, -2.0, -0.5, -0.5]
    assert adjusted(frequency_penalty=0.5) == [2.0, -2.0, -0.5, -1.0]
    assert adjusted(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=1.0) == [1.0, -4.0, -1.5, -2.0]


def test_a_huge_penalty_stays_finite() -> None:
    logits = f32(3e38, -3e38, 1)
    counts = TokenCounts(3, [0, 1])
    params = SamplingParams(temperature=0.0, repetition_penalty=1e-300, logit_bias={1: 100.0}, logprobs=0)
    assert draw(logits, params, counts=counts).token == 0


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = f32(1, 3, 2, 3)
    params = SamplingParams(temperature=0.1, top_k=1, logit_bias={0: 100.0}, logprobs=3)
    drawn = draw(logits, params)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(exact[0], abs=1e-12)
    assert drawn.top_logprobs is not None
    assert list(drawn.top_logprobs) == [1, 3, 2]
    assert list(drawn.top_logprobs.values()) == pytest.approx([exact[1], exact[3], exact[2]], abs=1e-12)


def test_logprobs_come_only_when_asked_for() -> None:
    assert draw(f32(1, 2), GREEDY) == Sampled(1)
    none_beside = draw(f32(1, 2), SamplingParams(temperature=0.0, logprobs=0))
    assert none_beside.logprob == pytest.approx(-math.log(1 + math.exp(-1)))
    assert none_beside.top_logprobs == {}


def test_more_alternatives_than_tokens_gives_all_there_are() -> None:
    drawn = draw(f32(1, 2, -math.inf), SamplingParams(temperature=0.0, logprobs=20))
    assert drawn.top_logprobs is not None
    assert list(drawn.top_logprobs) == [1, 0]


@given(st.lists(st.integers(0, 30), max_size=30), st.lists(st.integers(0, 30), max_size=30))
def test_counts_pushed_one_by_one_equal_counts_from_the_ids(prompt: list[int], generated: list[int]) -> None:
    counts = TokenCounts(31, prompt)
    for token in generated:
        counts.push(token)
    ids = np.array(prompt + generated, np.int32)
    assert counts == TokenCounts(31, ids, generation_start=len(prompt))
    assert counts.seen().tolist() == sorted({*prompt, *generated})
    assert dict(zip(*(each.tolist() for each in counts.generated()), strict=True)) == Counter(generated)


def test_forked_counts_go_their_own_ways() -> None:
    counts = TokenCounts(5, [1])
    counts.push(2)
    child = counts.fork()
    assert child == counts
    child.push(3)
    assert child != counts
    assert counts == TokenCounts(5, [1, 2], generation_start=1)


@pytest.mark.parametrize("ids", [[0, 5], [-1]])
def test_counts_refuse_an_id_outside_the_vocabulary(ids: Sequence[int]) -> None:
    with pytest.raises(BadParameter, match="run from 0 to 4"):
        TokenCounts(5, ids)
