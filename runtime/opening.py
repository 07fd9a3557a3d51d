"""`open_runtime`: from a model's name to a runtime in which sessions live."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from serai.checkpoints.snapshot import LatentType
from serai.checkpoints.store import Store
from serai.kernels import compile as kernels
from serai.kernels.ranks import let_in_at_once
from serai.kernels.threads import set_threads
from serai.runtime.engine import Engine
from serai.runtime.engine_thread import EngineThread
from serai.runtime.errors import BadParameter
from serai.runtime.experts.access import Experts
from serai.runtime.experts.heat import layer_heat
from serai.runtime.experts.notes import ExpertNotes, streamed_in
from serai.runtime.experts.opening import whole_working_sets
from serai.runtime.figures import ModelFacts
from serai.runtime.memory.accounts import Quota
from serai.runtime.memory.beside import PROCESS_BYTES, SESSION_BYTES
from serai.runtime.memory.byte_sizes import parse_bytes
from serai.runtime.memory.give_back import keep_little
from serai.runtime.memory.limits import default_budget, over_room
from serai.runtime.memory.plan import check_budget, plan_memory
from serai.runtime.models.layout import latent_type
from serai.runtime.models.open_model import FoundModel, LoadedModel, Precision, find_model, load_model
from serai.runtime.models.scratch import kernel_scratch_bytes
from serai.runtime.models.trunk import Trunk
from serai.runtime.python_lock import shared_fairly
from serai.runtime.runtime import Runtime, running
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy, assemble
from serai.runtime.sessions.journal import Journal
from serai.runtime.state import StatePool
from serai.runtime.status import ExpertStatus
from serai.runtime.to_the_end import in_thread_to_the_end

T = TypeVar("T")

log = logging.getLogger(__name__)

SESSION_SHARE = 25
"""Per cent of what a streaming model leaves of the budget that is for sessions; the rest holds experts."""

WIDE_SHARE = 20
"""Per cent of it that the memory of wide steps may take at most; with less there are none, and experts get it."""

LEAST_CONTEXT_TOKENS = 1_024
"""A budget that can't hold one session of this many tokens is refused when opening."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How far opening has come: `stage` says what is done now, `done` of `total` in that stage's own units."""

    stage: str
    done: int
    total: int


@asynccontextmanager
async def open_runtime(
    model: str | Path,
    *,
    budget: str | int | None = None,
    store: str | Path | None = None,
    precision: str | Precision = Precision.FAST,
    trunk: str | Trunk | None = None,
    latents: str | LatentType | None = None,
    experts_per_token: int | None = None,
    threads: int | None = None,
    warm_start: bool = False,
    trace: str | Path | None = None,
    policy: Policy | None = None,
    quotas: Mapping[str, Quota] | None = None,
    progress: Callable[[Opening], None] | None = None,
) -> AsyncIterator[Runtime]:
    """Open a model: "nano", a folder, or the name of one in the local Hugging Face cache.

    `budget` is the most memory to use ("2GiB" or bytes; default: what the machine and its control groups leave).
    `store` is the folder where sessions are kept; without one nothing is durable. `threads` defaults to the cores this
    process may use. `trunk="q8"` or `"q4"` holds the large projections in 8 or 4 bits. `latents` says how sessions keep
    what attention reads: "float32" (by default in exact precision), "bfloat16" (in fast) or "q8", in half of that; what
    that costs: `serai bench latents`. With `experts_per_token` each token visits fewer experts than the model was
    trained with (`models/fewer_experts.py`; `serai bench experts-per-token`). `policy` says what is kept so that
    nothing is computed twice. `quotas` bound what each namespace may have of the budget (`set_quota` changes them).
    `progress` is called from worker threads. Leaving the block closes every session.

    For models whose experts are read: `warm_start` begins with those most used when it was last opened so, and keeps
    which these are in the model's folder (`experts/usage.py`). `trace` is a file that is written at the end with the
    experts every step wanted, for `serai bench cache --trace`; until then it takes memory that is in no budget.

    Raises, before anything is loaded, `ModelNotFound`, `ConfigInvalid`, `WeightsInvalid`, `BudgetTooSmall` or
    `BadParameter`, and `StoreBusy` or `StoreInvalid` for the store.
    """
    chosen, held = Precision.parse(precision), Trunk.parse(trunk)
    kept_latents = latent_type(latents, fast=chosen is Precision.FAST)
    budget_bytes = chosen_budget(budget)
    if threads is not None:
        if threads < 1:
            raise BadParameter(f"threads is {threads}, but must be at least 1")
        set_threads(threads)
    keep_little()
    async with AsyncExitStack() as stack:
        stack.enter_context(shared_fairly())
        stack.enter_context(let_in_at_once())
        find = partial(find_model, model, experts_per_token=experts_per_token)
        found = await _made(stack, in_thread_to_the_end, find, lambda one: one.files.close())
        room = expert_room(found, chosen, budget_bytes, held, kept_latents)
        notes = ExpertNotes(
            found.path, found.config, warm_start=warm_start, trace=None if trace is None else Path(trace)
        )
        kept: Store | None = None
        if store is not None:
            kept = await _made(stack, in_thread_to_the_end, lambda: Store.open(str(store)), Store.close)
        thread = EngineThread()
        stack.push_async_callback(in_thread_to_the_end, thread.close)
        load = partial(_load, found, chosen, held, kept_latents, room, notes, progress)
        loaded = await _made(stack, thread.call, load, partial(_unload, notes))
        limits = Limits(wide_rows=room.wide_rows)
        runtime = _wire(found, loaded, thread, kept, chosen, budget_bytes, limits, policy)
        for namespace, quota in (quotas or {}).items():
            runtime.set_quota(namespace, quota)
        yield await stack.enter_async_context(running(runtime))


def chosen_budget(budget: str | int | None) -> int:
    """The budget asked for, in bytes, or what is free here less a reserve. One that is more than is free is taken at
    its word, with a warning."""
    if budget is None:
        return default_budget().budget_bytes
    chosen = parse_bytes(budget)
    try:
        warning = over_room(chosen, default_budget())
    except BadParameter:  # nothing tells how much is free
        warning = None
    if warning is not None:
        log.warning("%s", warning)
    return chosen


@dataclass(frozen=True, slots=True)
class ExpertRoom:
    """How many experts are held in memory at a time, None for all of them; and how many prompt tokens are read
    together when they are not, 0 for no more than an ordinary step holds."""

    slots: int | None
    wide_rows: int = 0


def expert_room(
    found: FoundModel,
    precision: Precision,
    budget_bytes: int,
    trunk: Trunk = Trunk.AS_STORED,
    latents: LatentType | None = None,
) -> ExpertRoom:
    """What the budget has room for: all experts whenever they fit.

    Raises `BudgetTooSmall` for a budget that can't hold the rest of the model, one session and one layer's experts for
    one token.
    """
    fast = precision is Precision.FAST
    kept = latent_type(latents, fast=fast)
    plan = plan_memory(
        found.config,
        found.files,
        context_tokens=LEAST_CONTEXT_TOKENS,
        step_rows=Limits().step_rows,
        kernel_scratch_bytes=kernel_scratch_bytes(found.config, Limits().step_rows, fast=fast),
        trunk=trunk,
        fast=fast,
    )
    if budget_bytes >= plan.floor_bytes.of(kept) or plan.moe_layers == 0:
        check_budget(plan, budget_bytes, kept)
        return ExpertRoom(slots=None)
    check_budget(plan, budget_bytes, kept, streaming=True)
    left = budget_bytes - plan.streaming_floor_bytes.of(kept)
    wide_rows = 0
    if plan.wide_scratch_bytes <= WIDE_SHARE * left // 100:
        wide_rows = plan.wide_rows
        left -= plan.wide_scratch_bytes
    more = (left - SESSION_SHARE * left // 100) // plan.expert_slot_bytes
    return ExpertRoom(whole_working_sets(plan.min_expert_slots + more, plan.token_experts), wide_rows)


def _wire(
    found: FoundModel,
    loaded: LoadedModel,
    thread: EngineThread,
    store: Store | None,
    precision: Precision,
    budget_bytes: int,
    limits: Limits,
    policy: Policy | None,
) -> Runtime:
    """The runtime over a loaded model: what the model leaves of the budget is for sessions."""
    streamed = streamed_in(loaded.model.experts)
    facts = ModelFacts(
        name=found.name,
        precision=precision.value,
        config=found.config,
        trunk_bytes=loaded.model.weights.bytes,
        expert_bytes=loaded.model.expert_bytes,
        scratch_bytes=loaded.model.scratch_bytes + PROCESS_BYTES,
        budget_bytes=budget_bytes,
        experts=_watch(loaded.model.experts),
        degraded=None if streamed is None else lambda: streamed.degraded,
    )
    taken_bytes = facts.trunk_bytes + facts.expert_bytes + facts.scratch_bytes
    pool = StatePool(loaded.layout, limit_bytes=budget_bytes - taken_bytes)
    services = assemble(
        engine=Engine(loaded.model, loaded.layout),
        thread=thread,
        pool=pool,
        journal=Journal(store, loaded.fingerprint, loaded.layout),
        tokenizer=found.tokenizer,
        vocab_size=found.config.vocab_size,
        max_positions=found.config.max_positions,
        stop_ids=frozenset(found.config.eos_ids),
        limits=limits,
        policy=policy,
        session_bytes=SESSION_BYTES,
    )
    return Runtime(services, facts)


def _watch(experts: Experts | None) -> Callable[[], ExpertStatus] | None:
    """What tells how streaming goes; None for a model whose experts are all in memory."""
    streamed = streamed_in(experts)
    if streamed is None:
        return None

    def look() -> ExpertStatus:
        status = streamed.status
        return ExpertStatus(
            slots=status.slots,
            experts=len(streamed.cache.layers) * streamed.cache.experts,
            hits=status.cache.hits + status.cache.late,
            late=status.cache.late,
            misses=status.cache.misses,
            guessed=status.cache.guessed,
            guesses_used=status.cache.guesses_used,
            read_bytes=status.reads.read_bytes,
            read_s=status.reads.reading_s,
            layers=layer_heat(streamed.cache),
            mode=status.mode.value,
            reads_in_flight=status.reads_in_flight,
            degraded=status.degraded,
        )

    return look


async def _made(
    stack: AsyncExitStack,
    on_thread: Callable[[Callable[[], None]], Awaitable[None]],
    make: Callable[[], T],
    close: Callable[[T], None],
) -> T:
    """What `make` gives, to be closed with the stack, even if it comes only after the wait for it was cancelled."""
    made: list[T] = []

    def close_all() -> None:
        for one in made:
            close(one)

    stack.push_async_callback(on_thread, close_all)
    await on_thread(lambda: made.append(make()))
    return made[0]


def _load(
    found: FoundModel,
    precision: Precision,
    trunk: Trunk,
    latents: LatentType,
    room: ExpertRoom,
    notes: ExpertNotes,
    progress: Callable[[Opening], None] | None,
) -> LoadedModel:
    """Compile (or load) the kernels and read the weights; runs on the engine thread."""

    def tell(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(Opening(stage, done, total))

    kernels.warm(lambda step: tell("kernels", step.done, step.total))
    loaded = load_model(
        found,
        precision,
        max_rows=Limits().step_rows,
        trunk=trunk,
        latents=latents,
        expert_slots=room.slots,
        wide_rows=room.wide_rows,
        recorder=notes.recorder,
        progress=lambda done, total: tell("weights", done, total),
    )
    try:
        notes.begin(loaded.model.experts, lambda done, total: tell("experts", done, total))
    except BaseException:
        loaded.model.close()
        raise
    return loaded


def _unload(notes: ExpertNotes, loaded: LoadedModel) -> None:
    """Close the model and write what is kept of its use; runs on the engine thread."""
    loaded.model.close()
    notes.end(loaded.model.experts)
