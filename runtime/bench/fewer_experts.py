"""`serai bench experts-per-token`: what fewer experts a token cost the nano model, and what they save.

Cost: `quality.py`. Savings: the bytes read for a token while experts are streamed, from the reader's own counter, with
the same number of slots in every row; and those of a token that finds nothing in the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench import quality
from serai.runtime.bench.quality import Asked, Exam, Quality, quality_claims
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.checks.stepping import Stepper
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.memory.plan import plan_memory
from serai.runtime.models.open_model import FoundModel, Precision, find_model, load_model
from serai.runtime.state import StatePool

STEP_ROWS = 256
SLOTS_SHARE = 4
"""The cache of the streamed runs holds one in so many of the model's experts: few enough that most tokens read."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What is asked, and how many tokens are fed one by one streaming."""

    asked: Asked
    streamed_tokens: int


FULL = Scale(quality.FULL, streamed_tokens=400)
QUICK = Scale(quality.QUICK, streamed_tokens=100)


@dataclass(frozen=True, slots=True)
class Trade:
    """One number of experts. `cold_token_bytes` is what a token reads that finds nothing in the cache,
    `read_token_bytes` what one read on average with `slots` experts held."""

    experts_per_token: int
    quality: Quality
    cold_token_bytes: int
    read_token_bytes: float
    slots: int

    def row(self) -> dict[str, object]:
        """Flat, for the report's table."""
        plain = asdict(self)
        return {**plain.pop("quality"), **plain}


def bench_fewer_experts(*, quick: bool, tell: Callable[[str], None], scale: Scale | None = None) -> Report:
    """A row for each number of experts from the nano model's own down to one, in fast precision."""
    chosen = scale or (QUICK if quick else FULL)
    whole = _found(None)
    own = 0 if whole.config.moe is None else whole.config.moe.experts_per_token
    loaded = load_model(whole, Precision.FAST, max_rows=STEP_ROWS)
    exam = Exam(whole, loaded, chosen.asked)
    loaded.model.close()
    whole.files.close()
    trades = []
    for count in range(own, 0, -1):
        tell(f"{count} of {own} experts a token")
        trades.append(_trade(count, exam, chosen.streamed_tokens))
    return Report("experts-per-token", tuple(_claims(trades, own)), tuple(trade.row() for trade in trades))


def _found(experts_per_token: int | None) -> FoundModel:
    return find_model("nano", experts_per_token=experts_per_token)


def _trade(count: int, exam: Exam, streamed_tokens: int) -> Trade:
    found = _found(count)
    loaded = load_model(found, Precision.FAST, max_rows=STEP_ROWS)
    result = exam.take(found, loaded)
    loaded.model.close()
    plan = plan_memory(found.config, found.files)
    slots = plan.moe_layers * plan.experts_per_layer // SLOTS_SHARE
    tokens = np.concatenate([case.prompt for case in exam.texts])[:streamed_tokens]
    read_bytes = _read_bytes(found, slots, tokens)
    found.files.close()
    return Trade(
        experts_per_token=count,
        quality=result,
        cold_token_bytes=plan.token_experts * plan.expert_slot_bytes,
        read_token_bytes=read_bytes / len(tokens),
        slots=slots,
    )


def _read_bytes(found: FoundModel, slots: int, tokens: NDArray[np.int32]) -> int:
    """Bytes read while the tokens are fed one at a time with so many experts held, none at first."""
    loaded = load_model(found, Precision.FAST, max_rows=STEP_ROWS, expert_slots=slots)
    experts = loaded.model.experts
    if not isinstance(experts, StreamedExperts):
        raise BenchFailed(f"{slots} slots hold all experts, so nothing is read")
    stepper = Stepper(loaded, StatePool(loaded.layout))
    stepper.run(tokens, [1] * len(tokens)).release()
    read_bytes = experts.status.reads.read_bytes
    loaded.model.close()
    return read_bytes


def _claims(trades: Sequence[Trade], own: int) -> list[Claim]:
    whole = trades[0]
    claims = []
    for one in trades[1:]:
        name = f"experts_per_token_{one.experts_per_token}"
        how = f"nano in fast precision, {one.experts_per_token} of its {own} experts a token"
        claims += quality_claims(name, one.quality, whole.quality, how=how, against=f"{own} experts")
        saved = (
            f"{one.read_token_bytes:,.0f} against {whole.read_token_bytes:,.0f} bytes a token with {one.slots} slots"
        )
        cold = f"a cold token: {one.cold_token_bytes:,} against {whole.cold_token_bytes:,}"
        share = one.read_token_bytes / whole.read_token_bytes if whole.read_token_bytes else 1.0
        claims.append(Claim.measured(f"{name}_read_share", share, "of the bytes", f"{saved}; {cold}; {how}"))
    return claims
