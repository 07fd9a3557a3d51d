"""What a model and its sessions take in memory, from config.json alone or with the safetensors headers.

Pure integer arithmetic: no weights are read, and every figure is exact. Shapes as in `models/tensor_table.py`, the
session's state as in `state.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.runtime.errors import BadParameter, BudgetTooSmall
from serai.runtime.memory.attention import PUBLISHED, AttentionCost, alternatives
from serai.runtime.memory.beside import PROCESS_BYTES, beside_bytes
from serai.runtime.memory.weights import expert_record_bytes, held_bytes
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.dtypes import STORAGE
from serai.runtime.models.layout import state_layout
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.scratch_shape import ScratchShape
from serai.runtime.models.tensor_table import (
    TensorSpec,
    expert_layers,
    expert_stem,
    expert_tensors,
    find_prefix,
    trunk_tensors,
)
from serai.runtime.models.trunk import Trunk
from serai.runtime.state import Part, part_bytes, session_bytes

DEFAULT_CONTEXT_TOKENS = 4096
DEFAULT_STEP_ROWS = 256

WIDE_ROWS = 2048
"""Prompt tokens that a streaming model reads together, if the budget has room for them: a layer's experts are read once
for all. More would save little: at 2,048 nearly every expert has dozens of rows to compute with."""

FIXED_STATES_RUNNING = 3
"""Fixed states of a running session: before the step, after it, and the one kept at the turn's start for undo."""


READING_RECORDS = 16
"""Experts' worth of memory that reads in flight may take beside the cache (`runtime/experts/calibrate.py`), where each
of a released expert's tensors is read from whole pages around it."""


@dataclass(frozen=True, slots=True)
class ByLatents:
    """A figure in bytes for each way of storing latents."""

    float32: int
    bfloat16: int
    q8: int

    def of(self, latents: LatentType) -> int:
        return {LatentType.FLOAT32: self.float32, LatentType.BFLOAT16: self.bfloat16, LatentType.Q8: self.q8}[latents]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The table behind `serai plan`. All sizes in bytes.

    `trunk_bytes` is the trunk as held in memory (`memory/weights.py`), `trunk_stored_bytes` the same tensors in the
    files, `trunk_saves_bytes` what each smaller trunk would save of the floors. A tied embedding counts once.
    `expert_bytes` is a routed expert in the files, `expert_slot_bytes` the record that holds one in memory; the floors
    and `min_expert_bytes` count records.

    `wide_scratch_bytes` is what steps of `wide_rows` rows take beside `scratch_bytes`, where experts are streamed and
    the budget has room; no floor counts it.

    `session_bytes` is KDA state, conv tails and the latents of `context_tokens`; `hot_session_bytes` is what a
    session in RAM holds: that, with whole pages of latents, the next-token logits, and its token ids and timeline
    (`memory/beside.py`). `running_session_bytes` adds the other fixed states and the page copy of a session that is
    being stepped.

    `process_bytes` is what the process takes beside all that.

    `floor_bytes` has everything resident: trunk, all experts, scratch, the process and one running session.
    `streaming_floor_bytes` has `min_expert_slots` experts instead of all, `working_set_bytes` as many as one token
    visits: a cache under that keeps no expert alive from one token to the next.
    """

    source: str
    family: str
    context_tokens: int
    step_rows: int
    trunk: str
    trunk_bytes: int
    trunk_saves_bytes: dict[str, int]
    trunk_stored_bytes: int
    scratch_bytes: int
    process_bytes: int
    wide_rows: int
    wide_scratch_bytes: int
    moe_layers: int
    experts_per_layer: int
    experts_per_token: int
    expert_bytes: int
    expert_slot_bytes: int
    experts_total_bytes: int
    token_experts: int
    token_expert_bytes: int
    min_expert_slots: int
    min_expert_slots_rule: str
    min_expert_bytes: int
    kda_layers: int
    mla_layers: int
    kda_bytes: int
    conv_bytes: int
    logits_bytes: int
    latent_token_bytes: ByLatents
    latent_page_bytes: ByLatents
    latent_bytes: ByLatents
    session_bytes: ByLatents
    hot_session_bytes: ByLatents
    running_session_bytes: ByLatents
    floor_bytes: ByLatents
    streaming_floor_bytes: ByLatents
    working_set_bytes: ByLatents
    comparison: tuple[AttentionCost, ...]

    def to_json(self) -> dict[str, object]:
        """Plain dictionaries, lists, strings and integers."""
        plain: dict[str, object] = asdict(self)
        plain["comparison"] = [asdict(cost) for cost in self.comparison]
        return plain


def plan_memory(
    config: ModelConfig,
    files: CheckpointFiles | None = None,
    *,
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    step_rows: int = DEFAULT_STEP_ROWS,
    kernel_scratch_bytes: int = 0,
    trunk: Trunk = Trunk.AS_STORED,
    fast: bool = True,
) -> MemoryPlan:
    """The plan for sessions of `context_tokens` tokens and steps of up to `step_rows` rows.

    `kernel_scratch_bytes` is what the compute threads keep for themselves; only who knows the threads can tell.
    Only `fast` precision has 8-bit activations, which a quantised trunk needs room for.
    With `files` the element types are those of the headers, without those the published checkpoints use. Raises
    `WeightsInvalid` when the files lack a tensor of the table, `BadParameter` for sizes below 1.
    """
    for name, value in (("context_tokens", context_tokens), ("step_rows", step_rows)):
        if value < 1:
            raise BadParameter(f"{name} is {value}, but must be at least 1")
    specs = trunk_tensors(config)
    prefix = "" if files is None else find_prefix(config, files.tensors)
    dtypes = _dtypes(specs, files, prefix)
    parts = expert_tensors(config)  # all experts are alike: `check_tensors` sees to it
    stem = prefix + expert_stem(expert_layers(config)[0], 0) if parts else ""
    packed = None
    if files is not None:
        # Not above: a record's layout is the kernels' own, and planning from a bare config.json needs no compiler.
        from serai.runtime.experts.packed_format import PackedModel

        packed = PackedModel.find(config, files, prefix)
    released = files if packed is None else None  # a packed model has records in place of these tensors
    part_dtypes = _dtypes(parts, released, stem)
    expert = sum(_stored_bytes(spec, part_dtypes[part], released, stem + part) for part, spec in parts.items())
    slot = expert_record_bytes(parts, part_dtypes)
    if packed is not None:
        expert = slot = packed.record_bytes
    moe = config.moe
    per_layer, per_token = (moe.experts, moe.experts_per_token) if moe is not None else (0, 0)
    experts = config.moe_layers * per_layer
    held = {kind: sum(held_bytes(config, spec, dtypes[name], kind) for name, spec in specs.items()) for kind in Trunk}
    token_experts = config.moe_layers * per_token
    reading = READING_RECORDS if moe is not None else 0
    shape = ScratchShape.of(config)
    activations = shape.q8_activation_bytes(step_rows) if fast else 0
    scratch = shape.bytes_for(step_rows) + kernel_scratch_bytes + (0 if trunk is Trunk.AS_STORED else activations)
    layouts = {latents: state_layout(config, latents) for latents in LatentType}
    layout = layouts[LatentType.FLOAT32]
    running = _by_latents({kind: _running_bytes(layouts[kind], context_tokens) for kind in LatentType})
    least = held[trunk] + scratch + PROCESS_BYTES
    token = _by_latents({kind: layouts[kind].token_bytes for kind in LatentType})
    latent = _times(token, context_tokens)
    return MemoryPlan(
        source="config" if files is None else "headers",
        family=config.family.value,
        context_tokens=context_tokens,
        step_rows=step_rows,
        trunk=trunk.value,
        trunk_bytes=held[trunk],
        trunk_saves_bytes={
            kind.value: held[trunk] - held[kind] - (activations if trunk is Trunk.AS_STORED else 0)
            for kind in (Trunk.Q8, Trunk.Q4)
        },
        trunk_stored_bytes=sum(_stored_bytes(spec, dtypes[name], files, prefix + name) for name, spec in specs.items()),
        scratch_bytes=scratch,
        process_bytes=PROCESS_BYTES,
        wide_rows=WIDE_ROWS if moe is not None else 0,
        wide_scratch_bytes=shape.wide_bytes(WIDE_ROWS) if moe is not None else 0,
        moe_layers=config.moe_layers,
        experts_per_layer=per_layer,
        experts_per_token=per_token,
        expert_bytes=expert,
        expert_slot_bytes=slot,
        experts_total_bytes=experts * expert,
        token_experts=token_experts,
        token_expert_bytes=token_experts * expert,
        min_expert_slots=per_token,
        min_expert_slots_rule=_slots_rule(per_token),
        min_expert_bytes=per_token * slot,
        kda_layers=config.kda_layers,
        mla_layers=config.mla_layers,
        kda_bytes=4 * prod(layout.kda_shape),
        conv_bytes=4 * prod(layout.conv_shape),
        logits_bytes=part_bytes(layout, Part.LOGITS),
        latent_token_bytes=token,
        latent_page_bytes=_by_latents({kind: part_bytes(layouts[kind], Part.PAGE) for kind in LatentType}),
        latent_bytes=latent,
        session_bytes=_plus(latent, part_bytes(layout, Part.FIXED)),
        hot_session_bytes=_by_latents({kind: _hot_bytes(layouts[kind], context_tokens) for kind in LatentType}),
        running_session_bytes=running,
        floor_bytes=_plus(running, least + experts * slot),
        # A model with few experts needs less to hold them all than to read them.
        streaming_floor_bytes=_plus(running, least + min((per_token + reading) * slot, experts * slot)),
        working_set_bytes=_plus(running, least + (token_experts + reading) * slot),
        comparison=(*alternatives(config, value_bytes=2), *PUBLISHED),
    )


def sessions_that_fit(plan: MemoryPlan, budget_bytes: int, latents: LatentType, *, streaming: bool = False) -> int:
    """How many sessions of the plan's context fit hot at once, one of them running; 0 when the budget is too small.

    With `streaming` the expert cache is at its smallest; otherwise all experts are resident.
    """
    floor = plan.streaming_floor_bytes if streaming else plan.floor_bytes
    left = budget_bytes - floor.of(latents)
    return 0 if left < 0 else 1 + left // plan.hot_session_bytes.of(latents)


def check_budget(plan: MemoryPlan, budget_bytes: int, latents: LatentType, *, streaming: bool = False) -> None:
    """Raises `BudgetTooSmall` when the budget is under the floor, naming its parts and the option that would fit."""
    floors = plan.streaming_floor_bytes if streaming else plan.floor_bytes
    floor = floors.of(latents)
    if budget_bytes >= floor:
        return
    slots = plan.min_expert_slots if streaming else plan.moe_layers * plan.experts_per_layer
    experts = slots * plan.expert_slot_bytes
    parts = (
        f"trunk {plan.trunk_bytes:,} + experts {experts:,} + scratch {plan.scratch_bytes:,} + the process "
        f"{plan.process_bytes:,} + one running session of {plan.context_tokens:,} tokens "
        f"{plan.running_session_bytes.of(latents):,}"
    )
    options = [f"a budget of {floor:,} bytes"]
    if (tokens := _tokens_that_fit(plan, budget_bytes - floor, latents)) > 0:
        options.append(f"a context of {tokens:,} tokens")
    forms = list(LatentType)  # from the largest to the smallest
    for smaller in forms[forms.index(latents) + 1 :]:
        if budget_bytes >= floors.of(smaller):
            options.append(f'latents="{smaller.value}"')
            break
    for trunk, saves in plan.trunk_saves_bytes.items():
        if saves > 0 and budget_bytes >= floor - saves:
            options.append(f'trunk="{trunk}"')
            break
    raise BudgetTooSmall(
        budget_bytes=budget_bytes, floor_bytes=floor, would_fit=f"that is {parts}; {' or '.join(options)} would fit"
    )


def _tokens_that_fit(plan: MemoryPlan, left_bytes: int, latents: LatentType) -> int:
    """The longest context, in whole pages, whose floor is within the budget; `left_bytes` is negative."""
    page = plan.latent_page_bytes.of(latents)
    if not page:
        return 0
    page_tokens = page // plan.latent_token_bytes.of(latents)
    pages = -(-plan.context_tokens // page_tokens) + left_bytes // page
    return max(0, pages) * page_tokens


def _hot_bytes(layout: StateLayout, tokens: int) -> int:
    return session_bytes(layout, tokens) + beside_bytes(tokens)


def _running_bytes(layout: StateLayout, tokens: int) -> int:
    more_states = FIXED_STATES_RUNNING - 1
    fixed = part_bytes(layout, Part.FIXED) + part_bytes(layout, Part.LOGITS)
    return _hot_bytes(layout, tokens) + more_states * fixed + part_bytes(layout, Part.PAGE)


def _dtypes(specs: Mapping[str, TensorSpec], files: CheckpointFiles | None, prefix: str) -> dict[str, str]:
    if files is None:
        return {name: spec.usual_dtype for name, spec in specs.items()}
    return {name: files.info(prefix + name).dtype for name in specs}


def _stored_bytes(spec: TensorSpec, dtype: str, files: CheckpointFiles | None, name: str) -> int:
    return prod(spec.shape) * STORAGE[dtype].itemsize if files is None else files.info(name).nbytes


def _slots_rule(experts_per_token: int) -> str:
    if not experts_per_token:
        return "the model has no routed experts"
    return f"the {experts_per_token} experts one token uses in one layer"


def _by_latents(values: Mapping[LatentType, int]) -> ByLatents:
    return ByLatents(**{kind.value: value for kind, value in values.items()})


def _plus(figure: ByLatents, more: int) -> ByLatents:
    return _by_latents({kind: figure.of(kind) + more for kind in LatentType})


def _times(figure: ByLatents, factor: int) -> ByLatents:
    return _by_latents({kind: figure.of(kind) * factor for kind in LatentType})
