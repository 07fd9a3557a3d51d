"""`serai bench model`: tokens a second of a mid-size model, by sessions at once and by context, through the engine.

Steps are taken by hand (`stepping.Stepper`), `fast` precision. A context is the state of a short prompt with random
latents up to there: what a step costs depends on how many latents there are, not on what they say. Sessions that read
share the rows of a step evenly. A cell takes its median over as many steps as fit a few seconds, one at least;
`--context` and `--sessions` measure some columns and lines of the grid alone, so that it can be had in pieces, and each
cell is told as soon as it is known.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.kernels.compile import warm
from serai.kernels.naive import bf16_round, q8_latents
from serai.kernels.threads import threads
from serai.runtime.bench.against import LLAMA_CLAIMS, bench_against_llama
from serai.runtime.bench.llama import why_not
from serai.runtime.bench.mid import MidModel, cached_mid_model, largest_that_fits, with_layers
from serai.runtime.bench.report import Claim, Report
from serai.runtime.checks.stepping import Stepper
from serai.runtime.errors import BadParameter
from serai.runtime.memory.limits import default_budget
from serai.runtime.models.layout import latent_type
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.state import State, StatePool, page_view, session_bytes

SESSIONS = (1, 4, 8, 16)
CONTEXTS = (0, 4_096, 32_768, 131_072)
QUICK_SESSIONS = (1, 8)
QUICK_CONTEXTS = (0, 4_096)
PREFILL_TOKENS = 512
"""Rows of a step that reads, of all its sessions together."""
LONG_CONTEXT, LONG_PREFILL_TOKENS = 32_768, 64
"""From that context on a prefill reads fewer tokens, or one call would take minutes."""
PROMPT_TOKENS = 64
STEPS, QUICK_STEPS = 9, 5
CELL_S = 5.0
"""No further step is begun in a cell after that long."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Decoding by that many sessions at that context, or reading more by them there; tokens a second of all together,
    None when their states, of `needed_bytes`, did not fit into `room_bytes`."""

    kind: str
    sessions: int
    context: int
    tokens_per_s: float | None
    rows: int
    """Tokens of a session in a call."""
    needed_bytes: int
    room_bytes: int

    @property
    def told(self) -> str:
        """The speed, or why there is none."""
        if self.tokens_per_s is None:
            return f"does not fit: {self.needed_bytes / 1e9:.1f} GB of states, {self.room_bytes / 1e9:.1f} free"
        return f"{self.tokens_per_s:.3g} tok/s"

    def row(self) -> dict[str, object]:
        return {
            "phase": self.kind,
            "sessions": self.sessions,
            "tokens a call": self.rows,
            "context": self.context,
            "tok/s": self.told if self.tokens_per_s is None else self.tokens_per_s,
        }


def bench_model(
    folder: Path,
    *,
    quick: bool,
    tell: Callable[[str], None],
    only_contexts: Sequence[int] = (),
    only_sessions: Sequence[int] = (),
    latents: str | None = None,
) -> Report:
    """Measure; `folder` keeps the model. `tell` is called with what is being done, and with what came of it.

    `only_contexts` and `only_sessions` replace those of the grid; `latents` are those that sessions keep. Raises
    `BadParameter` for a negative context, for more sessions than a step has rows, and for latents there are not.
    """
    kept = latent_type(latents, fast=True)
    if any(context < 0 for context in only_contexts):
        raise BadParameter(f"--context counts tokens: 0 or more, not {min(only_contexts)}")
    if any(not 1 <= count <= LONG_PREFILL_TOKENS for count in only_sessions):
        raise BadParameter(f"--sessions is from 1 to {LONG_PREFILL_TOKENS}, so that each has a row of every step")
    room = default_budget().budget_bytes
    # The weights once, and as much again for states and for the packing of what has been read.
    shape = with_layers(largest_that_fits(room // 2), 4, 32_768) if quick else largest_that_fits(room // 2)
    tell(f"a model of {shape.layers} layers in K3's layout")
    made = cached_mid_model(folder, shape)
    tell("reading its weights")
    warm()
    loaded = load_model(find_model(made.folder), Precision.FAST, max_rows=PREFILL_TOKENS, latents=kept)
    limit = room - loaded.model.weights.bytes - loaded.model.scratch.bytes
    sessions = only_sessions or (QUICK_SESSIONS if quick else SESSIONS)
    contexts = only_contexts or (QUICK_CONTEXTS if quick else CONTEXTS)
    cells = measure(loaded, limit, sessions, contexts, QUICK_STEPS if quick else STEPS, tell)
    return Report("model", tuple(_claims(cells, made, kept)), tuple(cell.row() for cell in cells))


def bench_against(
    folder: Path,
    peer: str,
    *,
    quick: bool,
    tell: Callable[[str], None],
    only_contexts: Sequence[int] = (),
    only_sessions: Sequence[int] = (),
    latents: str | None = None,
) -> Report:
    """The same model in serai and in `peer`, which can only be "llama"; `folder` keeps the model in both forms.

    Raises `BadParameter` for another peer, and for what only the grid takes. Where llama.cpp isn't installed the claims
    say so and are not measured.
    """
    if peer != "llama":
        raise BadParameter(f"--against is 'llama', not {peer!r}")
    for name, given in (("context", only_contexts), ("sessions", only_sessions), ("latents", latents)):
        if given:
            raise BadParameter(
                f"--{name} is for the grid, and --against has its own prompts and bfloat16; give one of the two"
            )
    if (why := why_not()) is not None:
        return Report("model", tuple(_unmeasured(why)))
    from serai.runtime.bench.gguf_model import cached_gguf  # needs the extra

    # The weights in the checkpoint's form (as they are read), in serai's and in llama.cpp's.
    room = default_budget().budget_bytes // 3
    shape = with_layers(largest_that_fits(room), 4 if quick else 16, 32_768)
    tell(f"a model of {shape.layers} layers in K3's layout")
    made = cached_mid_model(folder, shape)
    return bench_against_llama(made, cached_gguf(made.folder, tell), quick=quick, tell=tell)


def measure(
    loaded: LoadedModel,
    limit_bytes: int,
    sessions: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    tell: Callable[[str], None],
) -> list[Cell]:
    """Every cell; states that would take more than `limit_bytes` together are left out."""
    cells = []
    fixed = session_bytes(loaded.layout, PROMPT_TOKENS)
    for context in contexts:
        rows = PREFILL_TOKENS if context < LONG_CONTEXT else LONG_PREFILL_TOKENS
        for kind in ("prefill", "decode"):
            for count in sessions:
                tell(f"{kind}, {count} sessions at {context:,} tokens")
                tokens = max(rows // count, 1) if kind == "prefill" else 1
                calls = 1 if kind == "prefill" else steps + 1  # a prefill begins anew in each
                # A step has the state before it and the one after, which share all full pages of latents.
                after = session_bytes(loaded.layout, PROMPT_TOKENS + context + tokens * calls)
                needed = count * (after + fixed)
                fed = Fed(tokens, goes_on=kind == "decode")
                speed = _speed(loaded, count, context, fed, steps) if needed <= limit_bytes else None
                cells.append(Cell(kind, count, context, speed, tokens, needed, limit_bytes))
                tell(f"  {cells[-1].told}")
    return cells


@dataclass(frozen=True, slots=True)
class Fed:
    """What a call gives each session: so many tokens, which those of the next call follow, or are read anew."""

    tokens: int
    goes_on: bool


def _speed(loaded: LoadedModel, count: int, context: int, fed: Fed, steps: int) -> float:
    """Tokens a second, all sessions together. Each session and call has tokens of its own: experts are chosen by
    them."""
    stepper = Stepper(loaded, StatePool(loaded.layout))
    if not fed.goes_on and context == 0:
        states = [stepper.pool.empty() for _ in range(count)]
    else:
        states = [state_at(stepper, loaded, context, seed) for seed in range(count)]
    rng = np.random.default_rng(1)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 2 or (len(seconds) <= steps and time.perf_counter() - began < CELL_S):
        ids = rng.integers(0, loaded.model.config.vocab_size, (count, fed.tokens)).astype(np.int32)
        called = time.perf_counter()
        after, _ = stepper.feed([(state.retain(), own) for state, own in zip(states, ids, strict=True)])
        seconds.append(time.perf_counter() - called)
        # A prefill begins anew; decoding goes on.
        kept, dropped = (after, states) if fed.goes_on else (states, after)
        for state in dropped:
            state.release()
        states = kept
    for state in states:
        state.release()
    return count * fed.tokens / statistics.median(seconds[1:])


def state_at(stepper: Stepper, loaded: LoadedModel, context: int, seed: int) -> State:
    """A state after a short random prompt, with random latents for `context` tokens more."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, loaded.model.config.vocab_size, PROMPT_TOKENS).astype(np.int32)
    short = stepper.run(prompt)
    if context == 0:
        return short
    layout = loaded.layout
    draft = stepper.pool.draft(short, context, with_logits=True)
    if short.fixed is None or draft.logits is None:
        raise AssertionError("a state past position 0 has a fixed block, and this draft was asked for logits")
    draft.fixed.array[:] = short.fixed.array
    draft.logits.array[:] = 0
    latents = _random_page(layout, loaded.model.config.mla.kv_lora_rank, rng)
    for number, page in enumerate(draft.table.pages[PROMPT_TOKENS // layout.page_tokens :]):
        page_view(layout, page)[:] = latents
        # Some finite number or codes: a store keeps pages alike once.
        page.array.view(np.uint8)[:2] = divmod(number % 0x7F00, 256)[::-1]
    for source, target, rows in draft.copies:
        page_view(layout, target)[:, :rows] = page_view(layout, source)[:, :rows]
    state = draft.commit()
    short.release()
    return state


def _random_page(layout: StateLayout, rank: int, rng: np.random.Generator) -> NDArray[Any]:
    """Normal numbers as a page of the layout's latents, `[mla_layers, page_tokens, row_items]`."""
    drawn = rng.standard_normal((layout.mla_layers * layout.page_tokens, layout.latent_width), dtype=np.float32)
    rows: NDArray[Any] = drawn
    if layout.latent_type is LatentType.BFLOAT16:
        rows = bf16_round(drawn)
    elif layout.latent_type is LatentType.Q8:
        rows = np.concatenate([part.view(np.uint8) for part in q8_latents(drawn, rank)], axis=1)
    return rows.reshape(layout.mla_layers, layout.page_tokens, layout.row_items)


def _claims(cells: Sequence[Cell], made: MidModel, latents: LatentType) -> list[Claim]:
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    shape = made.shape
    size = f"{shape.layers} layers in K3's layout, {made.nbytes / 1e9:.1f} GB (BF16 trunk, MXFP4 experts)"
    where = f"{size}, fast precision, {latents.value} latents, {threads()} threads, {load}"
    wanted = {
        "decode_tok_s": ("decode", 1, "one session"),
        "prefill_tok_s": ("prefill", 1, f"{PREFILL_TOKENS} tokens"),
        "sessions8_tok_s": ("decode", 8, "eight sessions together"),
    }
    speeds = {(cell.kind, cell.sessions, cell.context): cell.tokens_per_s for cell in cells}
    claims = []
    for name, (kind, count, what) in wanted.items():
        speed = speeds.get((kind, count, 0))
        claims.append(Claim(name, speed, "tok/s", None, None, f"{what} at the start of a context; {where}"))
    return claims + _unmeasured("llama.cpp was not run beside it: give --against llama")


def _unmeasured(why: str) -> list[Claim]:
    return [Claim(name, None, "ratio", f">= {least:g}", None, why) for name, least in LLAMA_CLAIMS]
