"""`serai bench experts-per-token`: what fewer experts a token cost the nano model, and what they save.

Cost, against the same model with its own number of experts, on held-out conversations (`recall_cases.py`): the mean
KL divergence of the next-token distribution, how often the likeliest token is the same, and the share of questions
that are still answered right. Savings: the bytes read for a token while experts are streamed, from the reader's own
counter, with the same number of slots in every row; and those of a token that finds nothing in the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench.recall import Student
from serai.runtime.bench.recall_cases import Case, cases
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.chat import chat_format_for
from serai.runtime.checks.evaluation import every_logits
from serai.runtime.checks.stepping import Stepper
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.memory.plan import plan_memory
from serai.runtime.models.open_model import FoundModel, LoadedModel, Precision, find_model, load_model
from serai.runtime.state import StatePool

STEP_ROWS = 256
SLOTS_SHARE = 4
"""The cache of the streamed runs holds one in so many of the model's experts: few enough that most tokens read."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How many cases are compared and asked at each distance, and how many tokens are fed one by one streaming."""

    compared: dict[int, int]
    asked: dict[int, int]
    streamed_tokens: int


FULL = Scale(compared={256: 20, 1024: 10}, asked={256: 40, 1024: 40}, streamed_tokens=400)
QUICK = Scale(compared={256: 4}, asked={256: 8, 1024: 4}, streamed_tokens=100)


@dataclass(frozen=True, slots=True)
class Trade:
    """One number of experts. `kl` is the mean of KL(own number ‖ this) over `compared_tokens` rows, `top_1` the share
    of them with the same likeliest token, `recall` by distance the share of right answers. `cold_token_bytes` is what a
    token reads that finds nothing in the cache, `read_token_bytes` what one read on average with `slots` experts held.
    """

    experts_per_token: int
    kl: float
    top_1: float
    compared_tokens: int
    recall: dict[int, float]
    cold_token_bytes: int
    read_token_bytes: float
    slots: int


def bench_fewer_experts(*, quick: bool, tell: Callable[[str], None], scale: Scale | None = None) -> Report:
    """A row for each number of experts from the nano model's own down to one, in fast precision."""
    chosen = scale or (QUICK if quick else FULL)
    whole = _found(None)
    own = 0 if whole.config.moe is None else whole.config.moe.experts_per_token
    texts = [case for distance, count in chosen.compared.items() for case in _cases(whole, distance, count)]
    questions = {distance: _cases(whole, distance, count) for distance, count in chosen.asked.items()}
    loaded = load_model(whole, Precision.FAST, max_rows=STEP_ROWS)
    expected = [_log_probabilities(loaded, case) for case in texts]
    loaded.model.close()
    whole.files.close()
    trades = []
    for count in range(own, 0, -1):
        tell(f"{count} of {own} experts a token")
        trades.append(_trade(count, texts, expected, questions, chosen.streamed_tokens))
    return Report("experts-per-token", tuple(_claims(trades, own)), tuple(asdict(trade) for trade in trades))


def _found(experts_per_token: int | None) -> FoundModel:
    return find_model("nano", experts_per_token=experts_per_token)


def _cases(found: FoundModel, distance: int, count: int) -> list[Case]:
    if found.tokenizer is None:
        raise BenchFailed(f"the model {found.name} has no tokenizer, so nothing can be asked")
    return cases("recall", distance, count, chat_format_for(found.config.family.value, found.tokenizer))


def _trade(
    count: int,
    texts: Sequence[Case],
    expected: Sequence[NDArray[np.float64]],
    questions: dict[int, list[Case]],
    streamed_tokens: int,
) -> Trade:
    found = _found(count)
    if found.tokenizer is None:
        raise BenchFailed(f"the model {found.name} has no tokenizer, so nothing can be asked")
    loaded = load_model(found, Precision.FAST, max_rows=STEP_ROWS)
    divergence, same = [], []
    for case, right in zip(texts, expected, strict=True):
        here = _log_probabilities(loaded, case)
        divergence.append((np.exp(right) * (right - here)).sum(-1))
        same.append(right.argmax(-1) == here.argmax(-1))
    student = Student(
        Stepper(loaded, StatePool(loaded.layout)), chat_format_for(found.config.family.value, found.tokenizer)
    )
    recall = {distance: fmean(student.answers(case)[0] for case in some) for distance, some in questions.items()}
    loaded.model.close()
    plan = plan_memory(found.config, found.files)
    slots = plan.moe_layers * plan.experts_per_layer // SLOTS_SHARE
    tokens = np.concatenate([case.prompt for case in texts])[:streamed_tokens]
    read_bytes = _read_bytes(found, slots, tokens)
    found.files.close()
    return Trade(
        experts_per_token=count,
        kl=float(np.concatenate(divergence).mean()),
        top_1=float(np.concatenate(same).mean()),
        compared_tokens=sum(map(len, divergence)),
        recall=recall,
        cold_token_bytes=plan.token_experts * plan.expert_slot_bytes,
        read_token_bytes=read_bytes / len(tokens),
        slots=slots,
    )


def _log_probabilities(loaded: LoadedModel, case: Case) -> NDArray[np.float64]:
    """Of the next token after each token of a case's prompt, float64 `[T, V]`."""
    logits = every_logits(loaded, case.prompt).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    normalised: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return normalised


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
        rows = f"{how}, {one.compared_tokens:,} tokens of held-out conversations"
        claims += [
            Claim.measured(f"{name}_kl", one.kl, "nats", f"mean KL({own} ‖ {one.experts_per_token}); {rows}"),
            Claim.measured(f"{name}_top_1", one.top_1, "of tokens", f"the same likeliest token; {rows}"),
        ]
        for distance, share in one.recall.items():
            before = f"whole sentence right at {distance:,} tokens; {own} experts: {whole.recall[distance]:.3f}"
            claims.append(Claim.measured(f"{name}_recall_{distance}", share, "of answers", f"{before}; {how}"))
        saved = (
            f"{one.read_token_bytes:,.0f} against {whole.read_token_bytes:,.0f} bytes a token with {one.slots} slots"
        )
        cold = f"a cold token: {one.cold_token_bytes:,} against {whole.cold_token_bytes:,}"
        share = one.read_token_bytes / whole.read_token_bytes if whole.read_token_bytes else 1.0
        claims.append(Claim.measured(f"{name}_read_share", share, "of the bytes", f"{saved}; {cold}; {how}"))
    return claims
