"""Tenants share nothing, and none can learn by what it gets or by how long it waits that another has read the same."""

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from serai.runtime import Runtime
from serai.runtime.services import Policy
from serai.runtime.sessions.prefixes import digest_of
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import GREEDY

pytestmark = pytest.mark.anyio

KEEPING = Policy(reuse=True, snapshot_every=16, save_after_tokens=4)
IDS = [(5 * n) % 13 for n in range(100)]


class Untouchable:
    """Tables that nobody may look into."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"another namespace's {name} were looked at")


async def live(rt: Runtime, namespace: str) -> list[object]:
    """All that a tenant sees of reading a prefix that may be known: what was reused, replayed, computed and written."""
    before = rt.counters.prefilled_tokens
    first, second = await rt.session(namespace=namespace), await rt.session(namespace=namespace)
    seen: list[object] = [await first.append(IDS), await second.append([*IDS, 1])]
    fork = await first.fork(position=40)
    seen += [first.replay_tokens(position=50), fork.position]
    await first.generate(GREEDY).collect()
    await first.rewind(position=70)
    seen += [rt.counters.prefilled_tokens - before]
    return seen


async def test_what_another_namespace_has_read_is_neither_found_nor_looked_at() -> None:
    async with fake_runtime(policy=KEEPING) as alone:
        expected = await live(alone, "b")
    async with fake_runtime(policy=KEEPING) as rt:
        await live(rt, "a")
        tenants = rt._services.prefixes._tenants
        kept = tenants["a"]
        tenants["a"] = Untouchable()  # type: ignore[assignment]  # that is the point
        try:
            assert await live(rt, "b") == expected
        finally:
            tenants["a"] = kept


async def test_nobody_waits_for_what_another_namespace_is_computing() -> None:
    async with fake_runtime(policy=KEEPING) as rt:
        ids = np.array(IDS, np.int32)
        end = rt._services.prefixes.begin("a", len(ids), digest_of(ids))  # and it never ends
        with anyio.fail_after(10):
            session = await rt.session(namespace="b")
            assert (await session.append(ids)).prefilled == len(ids)
        waiting = await rt.session(namespace="a")
        with anyio.move_on_after(0.05) as waited:
            await waiting.append(ids)
        assert waited.cancelled_caught, "within the namespace it is waited for"
        end()


async def test_a_pause_writes_as_much_whoever_else_has_the_same_state(tmp_path: Path) -> None:
    """What the store has of another tenant saves this one neither bytes nor time."""
    written = []
    async with fake_runtime(store=tmp_path) as rt:
        for namespace in ("a", "b", "b"):
            session = await rt.session(namespace=namespace)
            await session.append(IDS)
            written.append((await session.pause()).written_bytes)
        first, second = written[0], written[1]
        assert abs(first - second) < 0.05 * first, "names of nodes differ in length once packed, and nothing else"
        assert written[2] < 0.5 * first, "what the same tenant has is not written again"
        points = [info.head_id for info in rt.store.sessions()] if rt.store else []
        for point in points:
            again = await rt.resume(point)
            assert again.tokens().tolist() == IDS
        assert rt.counters.prefilled_tokens == 3 * len(IDS)
