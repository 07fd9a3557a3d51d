"""What a cheaper way of running the nano model costs: the same held-out conversations, beside the model as it is."""

from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench.recall import Student
from serai.runtime.bench.recall_cases import Case, cases
from serai.runtime.bench.report import BenchFailed, Claim
from serai.runtime.chat import chat_format_for
from serai.runtime.checks.evaluation import every_logits
from serai.runtime.checks.stepping import Stepper
from serai.runtime.models.open_model import FoundModel, LoadedModel
from serai.runtime.state import StatePool


@dataclass(frozen=True, slots=True)
class Asked:
    """How many cases are compared and how many asked, at each distance in tokens."""

    compared: dict[int, int]
    asked: dict[int, int]


FULL = Asked(compared={256: 20, 1024: 10}, asked={256: 40, 1024: 40})
QUICK = Asked(compared={256: 4}, asked={256: 8, 1024: 4})


@dataclass(frozen=True, slots=True)
class Quality:
    """`kl` is the mean of KL(as it is ‖ this) over `compared_tokens` rows, in nats, `top_1` the share of them with the
    same likeliest token, `recall` by distance the share of right answers."""

    kl: float
    top_1: float
    compared_tokens: int
    recall: dict[int, float]


class Exam:
    """Conversations of which the model as it is has given its opinion."""

    def __init__(self, found: FoundModel, whole: LoadedModel, asked: Asked) -> None:
        self.texts = [case for distance, count in asked.compared.items() for case in _cases(found, distance, count)]
        self._questions = {distance: _cases(found, distance, count) for distance, count in asked.asked.items()}
        self._expected = [_log_probabilities(whole, case) for case in self.texts]

    def take(self, found: FoundModel, loaded: LoadedModel) -> Quality:
        """Compare another form of the model, and ask it."""
        divergence, same = [], []
        for case, right in zip(self.texts, self._expected, strict=True):
            here = _log_probabilities(loaded, case)
            divergence.append((np.exp(right) * (right - here)).sum(-1))
            same.append(right.argmax(-1) == here.argmax(-1))
        if found.tokenizer is None:
            raise BenchFailed(f"the model {found.name} has no tokenizer, so nothing can be asked")
        form = chat_format_for(found.config.family.value, found.tokenizer)
        student = Student(Stepper(loaded, StatePool(loaded.layout)), form)
        return Quality(
            kl=float(np.concatenate(divergence).mean()),
            top_1=float(np.concatenate(same).mean()),
            compared_tokens=sum(map(len, divergence)),
            recall={
                distance: fmean(student.answers(case)[0] for case in some) for distance, some in self._questions.items()
            },
        )


def quality_claims(name: str, one: Quality, whole: Quality, *, how: str, against: str) -> list[Claim]:
    """What a form of the model costs, beside the model `against` which it was compared."""
    rows = f"{how}, {one.compared_tokens:,} tokens of held-out conversations"
    claims = [
        Claim.measured(f"{name}_kl", one.kl, "nats", f"mean KL({against} ‖ this); {rows}"),
        Claim.measured(f"{name}_top_1", one.top_1, "of tokens", f"the same likeliest token; {rows}"),
    ]
    for distance, share in one.recall.items():
        before = f"whole sentence right at {distance:,} tokens; {against}: {whole.recall[distance]:.3f}"
        claims.append(Claim.measured(f"{name}_recall_{distance}", share, "of answers", f"{before}; {how}"))
    return claims


def _cases(found: FoundModel, distance: int, count: int) -> list[Case]:
    if found.tokenizer is None:
        raise BenchFailed(f"the model {found.name} has no tokenizer, so nothing can be asked")
    return cases("recall", distance, count, chat_format_for(found.config.family.value, found.tokenizer))


def _log_probabilities(loaded: LoadedModel, case: Case) -> NDArray[np.float64]:
    """Of the next token after each token of a case's prompt, float64 `[T, V]`."""
    logits = every_logits(loaded, case.prompt).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    normalised: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return normalised
