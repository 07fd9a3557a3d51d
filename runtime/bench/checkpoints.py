"""`serai bench checkpoints`: what it costs to keep a state, to bring it back, and to keep it in fewer bytes.

Saving and loading take turns with plain transfers of the same memory (`raw_disk.py`), so that both meet the same disk;
an event loop runs meanwhile and notes how late it is. The state has Kimi K3's shape, scaled to the room there is.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import numpy as np

from serai.checkpoints.harness.samples import FINGERPRINT
from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.reports import SaveReport
from serai.checkpoints.snapshot import Fingerprint, Snapshot, StateLayout, new_snapshot
from serai.checkpoints.store import DEFAULT_THREADS, Store
from serai.runtime.bench.checkpoint_codecs import codec_rows
from serai.runtime.bench.checkpoint_states import Shape, filled, grown, renewed, shape_that_fits
from serai.runtime.bench.raw_disk import Memory, drop_page_cache, read_raw, write_raw
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.resume import QUICK_TOKENS, RESUMED_TOKENS, resume_and_prefill
from serai.runtime.loop_delay import LoopDelay

ROUNDS = 5
QUICK_ROUNDS = 3
GROWN_TOKENS = 100

SAVE_LIMIT = 0.7
LOAD_LIMIT = 0.8
EXCESS_PAGES_LIMIT = 2.0
LOOP_DELAY_LIMIT_MS = 3.0
RESUME_LIMIT = 100.0

T = TypeVar("T")


@dataclass(slots=True)
class _Rates:
    """Bytes a second of each round."""

    save: list[float] = field(default_factory=list)
    raw_write: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    raw_read: list[float] = field(default_factory=list)


def bench_checkpoints(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure in a temporary folder below `folder`, whose disk is the one compared with."""
    with tempfile.TemporaryDirectory(prefix="serai-bench-checkpoints-", dir=folder) as scratch:
        return anyio.run(_bench, folder, Path(scratch), quick, tell)


async def _bench(folder: Path, scratch: Path, quick: bool, tell: Callable[[str], None]) -> Report:
    shape = shape_that_fits(scratch, quick=quick)
    tell(f"a state of {shape}")
    delay = LoopDelay()
    rates, excess_pages, increment = await _rounds(scratch, shape, QUICK_ROUNDS if quick else ROUNDS, delay, tell)
    tokens = QUICK_TOKENS if quick else RESUMED_TOKENS
    tell(f"reading {tokens:,} tokens, and resuming as many")
    resumed = await resume_and_prefill(scratch / "resume", folder, tokens, QUICK_ROUNDS if quick else ROUNDS)
    tell("codecs")
    table = await anyio.to_thread.run_sync(codec_rows, scratch, quick)
    where = f"{shape}; median of {len(rates.save)} rounds, by turns with raw transfers of {DEFAULT_THREADS} threads"
    return Report(
        "checkpoints",
        (
            _ratio(
                "save_vs_raw",
                statistics.median(rates.save) / statistics.median(rates.raw_write),
                "of raw",
                None if quick else SAVE_LIMIT,
                f"{_beside(rates.save, rates.raw_write)}; {where}, fsync included",
            ),
            _ratio(
                "load_vs_raw",
                statistics.median(rates.load) / statistics.median(rates.raw_read),
                "of raw",
                None if quick else LOAD_LIMIT,
                f"{_beside(rates.load, rates.raw_read)}; {where}, page cache dropped",
            ),
            Claim.at_most(
                "incremental_excess_pages",
                excess_pages,
                "pages",
                EXCESS_PAGES_LIMIT,
                f"{shape} and {GROWN_TOKENS} tokens more: {increment.new_raw_bytes:,} of {increment.raw_bytes:,} bytes "
                "were new, before compression; that beyond the fixed state and those tokens' latents",
            ),
            Claim.below(
                "loop_delay_p99_ms",
                1e3 * delay.p99_s(),
                "ms",
                LOOP_DELAY_LIMIT_MS,
                "how late an event loop ran what was due while saves and loads went on in threads",
            ),
            _ratio(
                "resume_vs_prefill",
                resumed.prefill_s / resumed.resume_s,
                "times",
                None if quick else RESUME_LIMIT,
                f"{resumed.model}, fast precision, {tokens:,} tokens: {resumed.prefill_s:.2f} s to read them, "
                f"{1e3 * resumed.resume_s:.1f} ms to resume the paused session of {resumed.state_bytes / 1e6:,.1f} MB "
                "from disk",
            ),
        ),
        tuple(table),
    )


def _ratio(name: str, value: float, unit: str, limit: float | None, detail: str) -> Claim:
    """Without a limit nothing is promised: a quick run's bytes do not outweigh the fsync of each file."""
    if limit is None:
        return Claim.measured(name, value, unit, f"{detail}; quick: no promise at this size")
    return Claim.at_least(name, value, unit, limit, detail)


def _beside(ours: list[float], raw: list[float]) -> str:
    mine, theirs = statistics.median(ours), statistics.median(raw)
    return (
        f"{mine / 1e6:,.0f} MB/s ({min(ours) / 1e6:,.0f} to {max(ours) / 1e6:,.0f}) beside {theirs / 1e6:,.0f} "
        f"({min(raw) / 1e6:,.0f} to {max(raw) / 1e6:,.0f})"
    )


async def _rounds(
    scratch: Path, shape: Shape, rounds: int, delay: LoopDelay, tell: Callable[[str], None]
) -> tuple[_Rates, float, SaveReport]:
    """All rounds, then the save of a state grown a little; its pages beyond what had to be written."""
    rng = np.random.default_rng(0)
    state = await anyio.to_thread.run_sync(filled, shape, rng)
    # What a load fills was there before, as a runtime's pool is: fresh memory would be measured otherwise.
    target = await anyio.to_thread.run_sync(_touched, shape)
    raw = scratch / "raw"
    raw.mkdir()
    rates = _Rates()
    fingerprint = replace(FINGERPRINT, state_layout=shape.layout.describe())
    with Store.open(str(scratch / "store")) as store:
        node = _node(shape.position)
        await anyio.to_thread.run_sync(store.record, node)
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            seconds, size = await anyio.to_thread.run_sync(write_raw, raw, _arrays(state), DEFAULT_THREADS)
            rates.raw_write.append(size / seconds)
            if number:
                await anyio.to_thread.run_sync(store.drop_snapshot, node.id)
            saved = await _watched(delay, lambda: _save(store, node.id, renewed(state), fingerprint))
            if saved.written_bytes < saved.raw_bytes // 4:
                raise BenchFailed(
                    f"only {saved.written_bytes:,} bytes of a new state were written, so no save was timed"
                )
            rates.save.append(state.size_bytes / saved.elapsed_s)
            await anyio.to_thread.run_sync(drop_page_cache, scratch)
            seconds, size = await anyio.to_thread.run_sync(read_raw, raw, _arrays(target), DEFAULT_THREADS)
            rates.raw_read.append(size / seconds)
            target.kda.fill(np.nan)
            seconds = await _watched(delay, lambda: _load(store, node.id, fingerprint, target))
            if not np.array_equal(target.kda, state.kda):
                raise BenchFailed("a loaded state is not the one that was saved")
            rates.load.append(state.size_bytes / seconds)
        shutil.rmtree(raw)
        # The store knows the full pages by the identities they had when they were saved.
        known = renewed(state)
        await anyio.to_thread.run_sync(store.drop_snapshot, node.id)
        await anyio.to_thread.run_sync(_save, store, node.id, known, fingerprint)
        child = _node(GROWN_TOKENS, node)
        await anyio.to_thread.run_sync(store.record, child)
        after = await anyio.to_thread.run_sync(grown, known, GROWN_TOKENS, rng)
        increment = await _watched(delay, lambda: _save(store, child.id, after, fingerprint))
    return rates, excess_pages(increment, shape.layout, GROWN_TOKENS), increment


def excess_pages(increment: SaveReport, layout: StateLayout, tokens: int) -> float:
    """What a save wrote beyond the fixed state and the latents of `tokens`, in pages over all MLA layers."""
    needed = layout.fixed_bytes + tokens * layout.token_bytes
    return (increment.new_raw_bytes - needed) / (layout.page_tokens * layout.token_bytes)


async def _watched(delay: LoopDelay, act: Callable[[], T]) -> T:
    """Run it in a thread while the event loop notes how late it is."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(delay.measure)
        result = await anyio.to_thread.run_sync(act)
        tasks.cancel_scope.cancel()
    return result


def _save(store: Store, node_id: str, state: Snapshot, fingerprint: Fingerprint) -> SaveReport:
    return store.save(node_id, state, fingerprint, reason="bench")


def _load(store: Store, node_id: str, fingerprint: Fingerprint, target: Snapshot) -> float:
    """Seconds to fill `target`."""
    began_s = time.perf_counter()
    store.load(node_id, fingerprint, allocate=lambda layout, position: target)
    return time.perf_counter() - began_s


def _arrays(state: Snapshot) -> list[Memory]:
    logits = [] if state.logits is None else [state.logits]
    return [state.kda, state.conv, *(page.rows for page in state.pages), *logits]


def _touched(shape: Shape) -> Snapshot:
    target = new_snapshot(shape.layout, shape.position)
    for array in _arrays(target):
        array.fill(0)
    return target


def _node(tokens: int, parent: NodeRecord | None = None) -> NodeRecord:
    start = 0 if parent is None else parent.position
    return NodeRecord(
        session_id=new_id() if parent is None else parent.session_id,
        kind=NodeKind.APPEND,
        position=start + tokens,
        tokens=np.arange(start, start + tokens, dtype=np.int32),
        parent_id=None if parent is None else parent.id,
        turn=0 if parent is None else parent.turn + 1,
    )
