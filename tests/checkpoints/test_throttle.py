"""No session can write-storm a disk, and none waits for ever."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from serai.checkpoints.throttle import Throttle, ThrottlePolicy, Wish

POLICY = ThrottlePolicy(min_interval_s=10, bytes_per_s=100, burst_bytes=1000)


def wish(session: str, node: str, size_bytes: int = 1, since_s: float = 0.0) -> Wish:
    return Wish(session, node, size_bytes, since_s)


def test_a_session_writes_once_in_an_interval_and_then_its_latest_state() -> None:
    throttle = Throttle(POLICY)
    throttle.wish(wish("a", "1"))
    assert [w.node_id for w in throttle.due(0.0)] == ["1"]
    for second in range(1, 10):
        throttle.wish(wish("a", str(second + 1), since_s=float(second)))
        assert throttle.due(float(second)) == []
    assert throttle.next_due_s(9.0) == 10.0
    assert [w.node_id for w in throttle.due(10.0)] == ["10"]
    assert throttle.next_due_s(10.0) is None


def test_bytes_are_limited_over_all_sessions() -> None:
    throttle = Throttle(POLICY)
    for number in range(8):
        throttle.wish(wish(f"s{number}", str(number), size_bytes=500))
    assert len(throttle.due(0.0)) == 2  # the burst
    assert throttle.due(0.0) == []
    later = throttle.next_due_s(0.0)
    assert later is not None
    assert len(throttle.due(later)) == 1
    assert len(throttle.due(later + 5)) == 1


def test_a_state_larger_than_the_burst_has_its_turn() -> None:
    throttle = Throttle(POLICY)
    throttle.wish(wish("a", "1", size_bytes=50_000))
    assert len(throttle.due(0.0)) == 1
    throttle.wish(wish("b", "1"))
    assert throttle.due(400.0) == []
    assert len(throttle.due(500.0)) == 1


def test_a_forgotten_wish_is_not_due() -> None:
    throttle = Throttle(POLICY)
    throttle.wish(wish("a", "1"))
    throttle.forget("a")
    assert throttle.due(100.0) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3000), st.floats(0, 20)), max_size=40))
def test_over_any_time_the_limits_hold_and_every_wish_is_met(steps: list[tuple[str, int, float]]) -> None:
    throttle, now_s, written, times = Throttle(POLICY), 0.0, 0, dict[str, list[float]]()
    largest = max((size for _, size, _ in steps), default=0)
    last: dict[str, str] = {}
    done: dict[str, str] = {}
    rounds = 0
    for number, (session, size, wait_s) in enumerate(steps):
        now_s += wait_s
        throttle.wish(wish(session, str(number), size, now_s))
        last[session] = str(number)
        for met in throttle.due(now_s):
            written += met.size_bytes
            times.setdefault(met.session_id, []).append(now_s)
            done[met.session_id] = met.node_id
        assert written <= POLICY.burst_bytes + now_s * POLICY.bytes_per_s + largest
    while (due_s := throttle.next_due_s(now_s)) is not None:
        now_s = max(now_s, due_s)
        for met in throttle.due(now_s):
            times.setdefault(met.session_id, []).append(now_s)
            done[met.session_id] = met.node_id
        rounds += 1
        assert rounds < 200
    assert done == last
    for met_s in times.values():
        assert all(b - a >= POLICY.min_interval_s - 1e-9 for a, b in pairwise(met_s))
