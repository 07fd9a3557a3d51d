"""What it costs that a session waits for a tool outside of memory: moving it out and back, against reading it again."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import numpy as np

from serai.checkpoints.nodes import NodeKind
from serai.checkpoints.store import Store
from serai.runtime.bench.mid import MID_K3, cached_mid_model, with_layers
from serai.runtime.bench.model import PROMPT_TOKENS, state_at
from serai.runtime.bench.no_engine import services_without_engine, session_at
from serai.runtime.bench.report import Claim
from serai.runtime.bench.tiny import TinyModel
from serai.runtime.checks.stepping import Stepper
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.opening import open_runtime
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.sessions.session import Session
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import State, StatePool

MOST_COST = 0.01
MID_VOCAB = 32_768
ROWS = Limits().step_rows
"""Tokens that a step reads."""

WAITS = 3
"""Sessions that wait, each with other tokens."""

SLICES = 5
"""Places in the context at which the mid-size model's speed of reading is measured; between them it is taken to change
evenly, as attention's share of the work does. Reading all of it would take minutes."""


@dataclass(frozen=True, slots=True)
class ToolWait:
    """One model's: seconds out, back and to read the tokens again; `same` says that it came back as it was."""

    model: str
    tokens: int
    state_bytes: int
    out_s: float
    back_s: float
    read_s: float
    same: bool

    @property
    def cost(self) -> float:
        return (self.out_s + self.back_s) / self.read_s

    def row(self) -> dict[str, object]:
        return {
            "part": "tool wait",
            "model": self.model,
            "tokens": self.tokens,
            "state_bytes": self.state_bytes,
            "out_s": self.out_s,
            "back_s": self.back_s,
            "read_s": self.read_s,
            "cost": self.cost,
        }

    def sentence(self) -> str:
        return (
            f"{self.model}, {self.tokens:,} tokens ({self.state_bytes / 2**20:,.0f} MiB): out in "
            f"{1e3 * self.out_s:.0f} ms, back in {1e3 * self.back_s:.0f} ms, "
            f"read in {self.read_s:.1f} s, so {self.cost:.4f}" + ("" if self.same else "; BUT IT CAME BACK DIFFERENT")
        )


def tool_claim(waits: Sequence[ToolWait]) -> Claim:
    """The dearest of them."""
    worst = max(one.cost for one in waits)
    holds = worst <= MOST_COST and all(one.same for one in waits)
    detail = "; ".join(one.sentence() for one in waits)
    detail += (
        "; just after thousands of files were deleted ext4 creates one more slowly, and moving out takes up to twice"
    )
    return Claim("tool_wait_cost", worst, "of reading it again", f"<= {MOST_COST:g}", holds, detail)


async def small_tool_wait(model: Path, name: str, folder: Path, tokens: int) -> ToolWait:
    """Through the whole runtime: the tokens are read, the session moves out and comes back. The median of `WAITS`."""
    os.sync()  # else the disk is still writing what was measured before
    with tempfile.TemporaryDirectory(prefix="serai-bench-tool-", dir=folder) as store:
        async with open_runtime(model, store=store, policy=Policy(reuse=False)) as rt:
            vocab = rt.facts.config.vocab_size if rt.facts.config else 1
            rng, waits = np.random.default_rng(5), []
            for _ in range(WAITS):
                async with await rt.session() as session:
                    began_s = time.perf_counter()
                    await session.append(rng.integers(0, vocab, tokens, dtype=np.int32))
                    read_s = time.perf_counter() - began_s
                    waits.append(await _out_and_back(session, name, rt.pool.live_bytes, read_s))
    return sorted(waits, key=lambda one: one.cost)[WAITS // 2]


def mid_shape(layers: int) -> TinyModel:
    """The mid-size model's first `layers`."""
    return with_layers(MID_K3, layers, MID_VOCAB)


async def mid_tool_wait(folder: Path, tokens: int, shape: TinyModel, tell: Callable[[str], None]) -> ToolWait:
    """A model of that `shape`: its state is one with random latents, its reading measured in `SLICES`."""
    tell(f"the same with {shape.layers} layers of the mid-size model")
    made = await anyio.to_thread.run_sync(lambda: cached_mid_model(folder, shape))
    loaded = await anyio.to_thread.run_sync(lambda: load_model(find_model(made.folder), Precision.FAST, max_rows=ROWS))
    name = (
        f"{shape.layers} of {MID_K3.layers} layers of the mid-size model ({made.nbytes / 1e9:.1f} GB), fast precision"
    )
    try:
        read_s = await anyio.to_thread.run_sync(_reading_s, loaded, tokens)
        with tempfile.TemporaryDirectory(prefix="serai-bench-tool-", dir=folder) as place:
            store = await anyio.to_thread.run_sync(Store.open, place)
            try:
                with services_without_engine(loaded.layout, store) as services:
                    stepper = Stepper(loaded, services.pool)
                    state = state_at(stepper, loaded, tokens - PROMPT_TOKENS, 0)
                    session = session_at(services, state)
                    session.record.started(Timeline(), NodeKind.ROOT)
                    session.record.appended(session.tokens(), session.timeline, {})
                    try:
                        return await _out_and_back(session, name, services.pool.live_bytes, read_s)
                    finally:
                        await session.close()
            finally:
                await anyio.to_thread.run_sync(store.close)
    finally:
        loaded.model.close()


async def _out_and_back(session: Session, name: str, state_bytes: int, read_s: float) -> ToolWait:
    before = await session.logits()
    began_s = time.perf_counter()
    moved = await session.demote()
    out_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    after = await session.logits()
    back_s = time.perf_counter() - began_s
    same = moved and bool(np.array_equal(before, after))
    return ToolWait(name, session.position, state_bytes, out_s, back_s, read_s, same)


def _reading_s(loaded: LoadedModel, tokens: int) -> float:
    """Seconds to read so many tokens from nothing, in steps of `ROWS`."""
    stepper = Stepper(loaded, StatePool(loaded.layout))
    places = np.linspace(0, tokens - ROWS, SLICES)
    return tokens * float(np.trapezoid([_row_s(stepper, loaded, int(place)) for place in places], dx=1 / (SLICES - 1)))


def _row_s(stepper: Stepper, loaded: LoadedModel, context: int) -> float:
    """Seconds a token of one step after so many: the better of two."""
    tokens = np.random.default_rng(1).integers(0, loaded.layout.vocab, ROWS).astype(np.int32)
    before: State = state_at(stepper, loaded, context, 0)
    seconds = []
    for _ in range(2):
        began_s = time.perf_counter()
        (after,), _ = stepper.feed([(before.retain(), tokens)])
        seconds.append(time.perf_counter() - began_s)
        after.release()
    before.release()
    return min(seconds) / ROWS
