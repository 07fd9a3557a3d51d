"""The scheduler shares a step by rule: decoding first, prompts evenly, nobody forgotten."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from serai.runtime.scheduler import HIGHEST_PRIORITY, Limits, Ready, Share, plan, plan_wide, weight_of

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


def test_of_states_that_no_step_has_tried_only_one_goes_into_a_step() -> None:
    def untried(key: int, served: float, source: str | None, tokens: int = 1) -> Ready:
        return Ready(key, tokens, served, decoding=tokens == 1, untried=source)

    ready = [untried(0, 2.0, "a"), untried(1, 1.0, "b"), untried(2, 3.0, "b"), untried(3, 0.0, None)]
    assert {share.key for share in plan(ready, LIMITS)} == {1, 2, 3}, "the least served, and who has forked from it"
    long = [untried(key, float(key), name, tokens=100) for key, name in enumerate("ab")]
    assert plan_wide(long, replace(LIMITS, wide_rows=64)) == (Share(0, 64),)


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


flows = st.lists(st.tuples(st.integers(-HIGHEST_PRIORITY, HIGHEST_PRIORITY), st.booleans()), min_size=1, max_size=24)


def steps_of(asking: list[tuple[int, bool]], count: int) -> list[dict[int, int]]:
    """What each of these gets in each step while all of them, one a workflow, want more than there is."""
    served = dict.fromkeys(range(len(asking)), 0.0)
    got: list[dict[int, int]] = []
    for _ in range(count):
        ready = [
            Ready(key, 1 if writes else 100, served[key], writes, str(key), weight_of(priority))
            for key, (priority, writes) in enumerate(asking)
        ]
        got.append({share.key: share.tokens for share in plan(ready, LIMITS)})
        for key, tokens in got[-1].items():
            served[key] += tokens / weight_of(asking[key][0])
    return got


@given(flows)
def test_nobody_waits_longer_than_its_weight_says_whoever_else_is_there(asking: list[tuple[int, bool]]) -> None:
    """Bounded wait: between two of its rows, a workflow sees at most what the others may get for one of its own."""
    weights = [weight_of(priority) for priority, _ in asking]
    got = steps_of(asking, 400)
    for key, weight in enumerate(weights):
        # While this one has one row, others come to that many rows each by weight, and one more each by division.
        others = sum(other / weight + 1 for index, other in enumerate(weights) if index != key)
        bound = others / 1 + 2  # a step moves one row at least
        last = -1
        for step, shares in enumerate(got):
            if shares.get(key):
                assert step - last <= bound, (key, step - last, bound)
                last = step
        assert len(got) - last <= bound


@given(st.lists(st.booleans(), min_size=2, max_size=12).map(lambda kinds: [(0, writes) for writes in kinds]))
def test_equal_workflows_of_one_kind_get_equal_shares(asking: list[tuple[int, bool]]) -> None:
    """Jain's index over those that write, and over those that read."""
    got = steps_of(asking, 200)
    for writes in (True, False):
        members = [key for key, (_, kind) in enumerate(asking) if kind is writes]
        shares = [sum(step.get(key, 0) for step in got) for key in members]
        if members:
            assert sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)) >= 0.95


@given(st.lists(st.integers(-HIGHEST_PRIORITY, HIGHEST_PRIORITY), min_size=2, max_size=8))
def test_prompts_get_rows_by_weight(priorities: list[int]) -> None:
    assume(sum(map(weight_of, priorities)) <= 64 * min(map(weight_of, priorities)))
    got = steps_of([(priority, False) for priority in priorities], 300)
    total = sum(map(weight_of, priorities))
    for key, priority in enumerate(priorities):
        share = sum(step.get(key, 0) for step in got) / (300 * LIMITS.step_rows)
        assert abs(share - weight_of(priority) / total) < 0.02


def test_more_who_write_than_fit_leave_prompts_their_part() -> None:
    ready = [decoding(key, 1, 0.0) for key in range(40)] + [prompt(40, 100, 9.0)]
    shares = {share.key: share.tokens for share in plan(ready, LIMITS)}
    assert shares[40] == LIMITS.prefill_rows_beside_decode
    assert sum(shares.values()) == LIMITS.step_rows


WIDE = Limits(step_rows=16, prefill_rows_beside_decode=4, wide_rows=64)


def test_a_wide_step_takes_long_prompts_only() -> None:
    ready = [prompt(0, 4, 0.0), prompt(1, 5, 1.0), decoding(2, 9, 0.0), prompt(3, 100, 0.0)]
    assert plan_wide(ready, WIDE) == (Share(3, 59), Share(1, 5))
    assert plan_wide([prompt(key, 4, 0.0) for key in range(9)], WIDE) == ()


def test_a_wide_step_has_no_more_prompts_than_an_ordinary_one_has_rows() -> None:
    shares = plan_wide([prompt(key, 100, float(-key)) for key in range(40)], WIDE)
    assert [share.key for share in shares] == list(range(39, 23, -1))
    assert sum(share.tokens for share in shares) == 64
