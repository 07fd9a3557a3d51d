"""The scheduler shares a step by rule: decoding first, prompts evenly, nobody forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.scheduler import Limits, Ready, Share, plan

LIMITS = Limits(step_rows=16, prefill_rows_beside_decode=4)


def prompt(key: int, tokens: int, served: float) -> Ready:
    return Ready(key, tokens, served, decoding=False)


def decoding(key: int, tokens: int, served: float) -> Ready:
    return Ready(key, tokens, served, decoding=True)


def test_guesses_are_fed_whole_or_not_at_all() -> None:
    ready = [decoding(0, 9, 0.0), decoding(1, 9, 1.0), prompt(2, 50, 0.0)]
    assert plan(ready, LIMITS) == (Share(0, 9), Share(2, 4))


def test_decoding_goes_first_and_prompts_share_a_bounded_rest() -> None:
    ready = [prompt(0, 100, 0.0), decoding(1, 1, 5.0), prompt(2, 100, 3.0)]
    assert plan(ready, LIMITS) == (Share(1, 1), Share(0, 2), Share(2, 2))


def test_workflows_share_evenly_whatever_their_number_of_forks() -> None:
    forks = [Ready(key, 50, 0.0, decoding=False, workflow="parent") for key in range(20)]
    single = Ready(20, 50, 5.0, decoding=False, workflow="single")
    shares = {share.key: share.tokens for share in plan([*forks, single], LIMITS)}
    assert shares == {**dict.fromkeys(range(8), 1), 20: 8}


def test_what_one_does_not_want_goes_to_the_others_in_whatever_order_they_came() -> None:
    assert plan([prompt(0, 100, 0.0), prompt(1, 2, 1.0)], LIMITS) == (Share(0, 14), Share(1, 2))


def test_a_prompt_alone_gets_the_whole_step() -> None:
    assert plan([prompt(0, 100, 0.0)], LIMITS) == (Share(0, 16),)


def test_a_short_prompt_leaves_its_part_to_the_others() -> None:
    assert plan([prompt(0, 2, 0.0), prompt(1, 100, 1.0)], LIMITS) == (Share(0, 2), Share(1, 14))


def test_a_draw_without_tokens_takes_no_rows() -> None:
    ready = [decoding(0, 0, 0.0), prompt(1, 40, 0.0)]
    assert plan(ready, LIMITS) == (Share(0, 0), Share(1, 16))


def test_when_more_decode_than_fit_the_least_served_go() -> None:
    ready = [decoding(key, 1, float(key % 3)) for key in range(24)]
    chosen = {share.key for share in plan(ready, LIMITS)}
    assert chosen == {key for key in range(24) if key % 3 < 2}


requests = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 100)), max_size=40)


@given(requests)
def test_a_step_never_holds_more_rows_than_it_may_nor_more_than_was_asked(asked: list[tuple[int, float]]) -> None:
    ready = [Ready(key, tokens, served, decoding=tokens < 4) for key, (tokens, served) in enumerate(asked)]
    shares = plan(ready, LIMITS)
    assert sum(share.tokens for share in shares) <= LIMITS.step_rows
    assert len({share.key for share in shares}) == len(shares)
    for share in shares:
        assert 0 <= share.tokens <= ready[share.key].tokens
        assert not ready[share.key].decoding or share.tokens == ready[share.key].tokens
        assert share.tokens > 0 or ready[share.key].tokens == 0
    assert bool(shares) == bool(ready)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_every_request_is_finished_within_a_bounded_number_of_steps(lengths: list[int]) -> None:
    left = dict(enumerate(lengths))
    served = dict.fromkeys(left, 0.0)
    steps = 0
    while left:
        steps += 1
        for share in plan([prompt(key, tokens, served[key]) for key, tokens in left.items()], LIMITS):
            served[share.key] += max(share.tokens, 1)
            left[share.key] -= share.tokens
            if left[share.key] == 0:
                del left[share.key]
    # A step always moves min(rows asked, prefill_rows_beside_decode) rows at least.
    assert steps <= sum(lengths) // LIMITS.prefill_rows_beside_decode + len(lengths) + 1
