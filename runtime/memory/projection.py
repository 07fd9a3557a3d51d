"""How fast a model would be on a machine whose disk and processor have been measured. Arithmetic only.

A step of n rows (one token of n sessions, or n tokens of one prompt), L layers of E experts, k a token:

wants `distinct` experts, each read once for all rows, and finds the share `hit` of them in memory. Its time is the
longer of reading the others and computing; `FORMULA` has the terms, `ASSUMPTIONS` what they take for granted.
"""

from dataclasses import asdict, dataclass
from math import prod

from serai.checkpoints.snapshot import LatentType
from serai.runtime.memory.plan import READING_RECORDS, MemoryPlan
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.tensor_table import TensorRole, trunk_tensors

ASSUMPTIONS = (
    "routing is even: every expert is as likely as any other, whatever the token before picked (real routing repeats "
    "itself, so both hits and sharing are better)",
    "the hit rate is the share of all experts that the cache holds",
    "reading hides behind computing entirely, and computing behind reading",
    "the disk keeps the rate measured now, for reads of this model's expert size spread over all of its files",
    "a step with many rows multiplies at the rate of many rows; weights cross the memory bus once a step",
)

FORMULA = (
    "distinct = L * E * (1 - (1 - k/E)^n)",
    "hit = slots / (L * E)",
    "disk = distinct * (1 - hit) * expert_bytes / disk_rate",
    "weights = trunk_bytes / trunk_rate + distinct * expert_bytes / expert_rate",
    "products = 2 * n * (trunk_weights + L * k * expert_weights) / product_rate",
    "states = sessions * 2 * state_bytes / state_rate",
    "latents = n * context * attention_operations / attention_rate",
    "step = max(disk, max(weights, products) + states + latents)",
    "tok/s = n / step",
)

SESSIONS = (1, 8, 64)
PROMPT_TOKENS = 2_048


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured, each a second: bytes from the disk, bytes of the trunk and of experts in products of one row,
    operations of products with many rows, bytes of state read and written by KDA steps, operations of attention."""

    disk_bytes: float
    trunk_bytes: float
    expert_bytes: float
    product_operations: float
    state_bytes: float
    attention_operations: float


@dataclass(frozen=True, slots=True)
class Quantities:
    """What a model brings into the formula. `trunk_bytes` are those a step reads: all but the embedding."""

    layers: int
    experts: int
    per_token: int
    expert_bytes: int
    expert_weights: int
    trunk_bytes: int
    trunk_weights: int
    state_bytes: int
    attention_operations: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the projection; times in seconds. `memory_bytes` is what it takes for granted that there is: the
    budget, or the least that holds the sessions and one token's experts."""

    what: str
    rows: int
    sessions: int
    memory_bytes: int
    slots: int
    distinct: float
    sharing: float
    hit: float
    read_bytes: float
    disk_s: float
    weights_s: float
    products_s: float
    states_s: float
    latents_s: float
    step_s: float
    tokens_per_s: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def quantities(config: ModelConfig, plan: MemoryPlan) -> Quantities:
    """What the formula needs of a model, planned for its context."""
    matrices = (TensorRole.MATRIX, TensorRole.HEAD, TensorRole.KV_UP, TensorRole.ROUTER, TensorRole.GATE)
    specs = trunk_tensors(config).values()
    embedding = 0 if config.tie_word_embeddings else 2 * config.vocab_size * config.hidden_size
    mla = config.mla
    return Quantities(
        layers=plan.moe_layers,
        experts=plan.experts_per_layer,
        per_token=plan.experts_per_token,
        expert_bytes=plan.expert_slot_bytes,
        expert_weights=0 if config.moe is None else 3 * config.moe.latent * config.moe.inner,
        trunk_bytes=plan.trunk_bytes - embedding,
        trunk_weights=sum(prod(spec.shape) for spec in specs if spec.role in matrices),
        state_bytes=plan.kda_bytes + plan.conv_bytes,
        attention_operations=config.mla_layers * 2 * mla.heads * (2 * mla.kv_lora_rank + mla.rope_dim),
        context_tokens=plan.context_tokens,
    )


def project(
    config: ModelConfig, plan: MemoryPlan, speeds: Speeds, budget_bytes: int, latents: LatentType
) -> list[Step]:
    """A row for each of `SESSIONS`, and one for a prompt of `PROMPT_TOKENS` read in one step."""
    model = quantities(config, plan)
    steps = [
        _step(f"{count} session{'s' * (count > 1)}", count, count, model, plan, speeds, budget_bytes, latents)
        for count in SESSIONS
    ]
    prompt = f"{PROMPT_TOKENS:,} prompt tokens"
    return [*steps, _step(prompt, PROMPT_TOKENS, 1, model, plan, speeds, budget_bytes, latents)]


def _step(
    what: str,
    rows: int,
    sessions: int,
    model: Quantities,
    plan: MemoryPlan,
    speeds: Speeds,
    budget_bytes: int,
    latents: LatentType,
) -> Step:
    total = model.layers * model.experts
    least = plan.trunk_bytes + plan.scratch_bytes + plan.process_bytes
    rest = least + sessions * plan.running_session_bytes.of(latents)
    memory = max(budget_bytes, rest + min(plan.token_experts + READING_RECORDS, total) * model.expert_bytes)
    slots = 0 if not total else min(total, (memory - rest) // model.expert_bytes)
    if 0 < slots < total:
        slots -= READING_RECORDS  # reads in flight have memory of their own
    distinct = total * (1 - (1 - model.per_token / model.experts) ** rows) if total else 0.0
    hit = slots / total if total else 1.0
    read_bytes = distinct * (1 - hit) * model.expert_bytes
    disk_s = read_bytes / speeds.disk_bytes
    weights_s = model.trunk_bytes / speeds.trunk_bytes + distinct * model.expert_bytes / speeds.expert_bytes
    weights = model.trunk_weights + model.layers * model.per_token * model.expert_weights
    products_s = 2 * rows * weights / speeds.product_operations
    states_s = sessions * 2 * model.state_bytes / speeds.state_bytes
    latents_s = rows * model.context_tokens * model.attention_operations / speeds.attention_operations
    step_s = max(disk_s, max(weights_s, products_s) + states_s + latents_s)
    return Step(
        what=what,
        rows=rows,
        sessions=sessions,
        memory_bytes=memory,
        slots=slots,
        distinct=distinct,
        sharing=distinct / (rows * model.layers * model.per_token) if total else 1.0,
        hit=hit,
        read_bytes=read_bytes,
        disk_s=disk_s,
        weights_s=weights_s,
        products_s=products_s,
        states_s=states_s,
        latents_s=latents_s,
        step_s=step_s,
        tokens_per_s=rows / step_s,
    )
