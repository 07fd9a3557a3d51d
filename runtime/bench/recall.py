"""`serai bench recall`: what the nano model still knows of what it read, by task and by distance.

Every case is a conversation that ends in a question (`recall_cases.py`). A case is right when the likeliest token, one
after the other, writes exactly the expected sentence. To show where the memory is, some are asked again after one kind
of it has been taken away from the state when the answer is due: the KDA matrices set to zero, or the latents of all but
the first tokens dropped. What is lost with the KDA matrices then is the question as well as the notebook, so they are
also zeroed before the question, which is then read with both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean

import numpy as np

from serai.checkpoints.snapshot import LatentPage, Snapshot
from serai.runtime.bench.recall_cases import Case, cases
from serai.runtime.bench.recall_torch import Judge, torch_judge
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.chat import ChatFormat, chat_format_for
from serai.runtime.chat.k3_tags import CLOSE
from serai.runtime.checks.stepping import Stepper
from serai.runtime.models.open_model import FoundModel, Precision, find_model, load_model
from serai.runtime.state import State, StatePool, fill, snapshot_of

STEP_ROWS = 256
LEFT_LATENTS = 4
"""Dropping latents leaves those of the first tokens: markup, in which heads rest that look for nothing."""


class Memory(Enum):
    """What is left of the state when the answer is due."""

    WHOLE = "whole"
    NO_KDA = "KDA zeroed"
    NO_KDA_OF_NOTEBOOK = "KDA zeroed before the question"
    NO_LATENTS = "latents dropped"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which cases are asked: `counts` says how many at which distance."""

    tasks: tuple[str, ...]
    counts: dict[int, int]
    damaged_tasks: tuple[str, ...]
    damaged_counts: dict[int, int]


FULL = Plan(
    tasks=("recall", "corrected", "correction_kept", "untouched", "absent", "count"),
    counts={256: 40, 1024: 40, 4096: 20},
    damaged_tasks=("recall", "corrected"),
    damaged_counts={256: 40, 1024: 40},
)
QUICK = Plan(
    tasks=("recall", "corrected"),
    counts={256: 8, 1024: 8, 4096: 3},
    damaged_tasks=("recall",),
    damaged_counts={1024: 8},
)

TORCH = "torch"
FAR = 4096
LIMITS = {"recall_1k": 0.95, "recall_4k": 0.85, "recall_corrected": 0.9}


@dataclass(frozen=True, slots=True)
class Score:
    """The shares of cases whose whole answer, and whose remembered value alone, came out right."""

    reader: str
    """`exact` or `fast`, the engine's precisions, or `torch`."""
    memory: Memory
    task: str
    distance_tokens: int
    cases: int
    answer: float
    value: float
    chance: float

    def to_json(self) -> dict[str, object]:
        return {
            "reader": self.reader,
            "memory": self.memory.value,
            "task": self.task,
            "distance_tokens": self.distance_tokens,
            "cases": self.cases,
            "answer": self.answer,
            "value": self.value,
            "chance": self.chance,
        }


def bench_recall(*, quick: bool, tell: Callable[[str], None], plan: Plan | None = None) -> Report:
    """Ask the nano model inside the package, in both precisions and where it can be had the torch model it came from.

    The claims are those of `fast`, the default.
    """
    chosen = plan or (QUICK if quick else FULL)
    found = find_model("nano")
    scores: list[Score] = []
    try:
        for precision in (Precision.EXACT, Precision.FAST):
            scores += _asked(found, precision, chosen, tell)
        judge = torch_judge(found.path)
        if not isinstance(judge, str):
            scores += _asked_torch(judge, _chat(found), chosen, tell)
    finally:
        found.files.close()
    claims = [*_claims(scores), _torch_claim(scores, judge if isinstance(judge, str) else "no such case was asked")]
    return Report("recall", tuple(claims), tuple(score.to_json() for score in scores))


def _chat(found: FoundModel) -> ChatFormat:
    if found.tokenizer is None:
        raise BenchFailed(f"the model {found.name} has no tokenizer, so nothing can be asked")
    return chat_format_for(found.config.family.value, found.tokenizer)


def _asked_torch(judge: Judge, chat: ChatFormat, plan: Plan, tell: Callable[[str], None]) -> list[Score]:
    scores = []
    for task in plan.tasks:
        for distance, count in plan.counts.items():
            tell(f"{TORCH}: {task} at {distance:,} tokens, {count} cases")
            some = cases(task, distance, count, chat)
            scores.append(_score(TORCH, Memory.WHOLE, some, distance, [judge(case) for case in some]))
    return scores


def _asked(found: FoundModel, precision: Precision, plan: Plan, tell: Callable[[str], None]) -> list[Score]:
    chat = _chat(found)
    loaded = load_model(found, precision, max_rows=STEP_ROWS)
    student = Student(Stepper(loaded, StatePool(loaded.layout)), chat)
    scores = []
    try:
        for task in plan.tasks:
            for distance, count in plan.counts.items():
                tell(f"{precision.value}: {task} at {distance:,} tokens, {count} cases")
                damaged = plan.damaged_counts.get(distance, 0) if task in plan.damaged_tasks else 0
                asked = cases(task, distance, count, chat)
                for memory in Memory:
                    some = asked if memory is Memory.WHOLE else asked[:damaged]
                    if some:
                        results = [student.answers(case, memory) for case in some]
                        scores.append(_score(precision.value, memory, some, distance, results))
    finally:
        loaded.model.close()
    return scores


def _score(
    reader: str, memory: Memory, some: Sequence[Case], distance: int, results: Sequence[tuple[bool, bool]]
) -> Score:
    return Score(
        reader=reader,
        memory=memory,
        task=some[0].task,
        distance_tokens=distance,
        cases=len(some),
        answer=fmean(whole for whole, _ in results),
        value=fmean(value for _, value in results),
        chance=fmean(case.chance for case in some),
    )


def _claims(scores: Sequence[Score]) -> list[Claim]:
    def of(memory: Memory, task: str, *distances: int) -> list[Score]:
        return [
            one
            for one in scores
            if (one.reader, one.memory, one.task) == (Precision.FAST.value, memory, task)
            and (not distances or one.distance_tokens in distances)
        ]

    wanted = {
        "recall_1k": of(Memory.WHOLE, "recall", 1024),
        "recall_4k": of(Memory.WHOLE, "recall", FAR),
        "recall_corrected": of(Memory.WHOLE, "corrected"),
        "recall_1k_without_kda": of(Memory.NO_KDA, "recall", 1024),
        "recall_1k_without_kda_of_notebook": of(Memory.NO_KDA_OF_NOTEBOOK, "recall", 1024),
        "recall_1k_without_latents": of(Memory.NO_LATENTS, "recall", 1024),
    }
    claims = []
    for name, found in wanted.items():
        if not found:
            claims.append(Claim(name, None, "of answers", None, None, "no such case was asked"))
            continue
        asked = sum(one.cases for one in found)
        share = sum(one.answer * one.cases for one in found) / asked
        chance = sum(one.chance * one.cases for one in found) / asked
        distances = ", ".join(f"{one.distance_tokens:,}" for one in found)
        how = (
            f"nano in fast precision, {asked} held-out cases at {distances} tokens, whole sentence; chance {chance:.3f}"
        )
        if name == "recall_corrected":
            how += "; the first value is that far back, its correction comes after all of the notebook"
        if name in LIMITS:
            claims.append(Claim.at_least(name, share, "of answers", LIMITS[name], how))
        else:
            claims.append(Claim.measured(name, share, "of answers", how))
    return claims


def _torch_claim(scores: Sequence[Score], reason: str) -> Claim:
    """How many groups of cases, asked whole, come out the same in the torch model and in `exact`."""
    name = "recall_equals_torch"
    groups: dict[tuple[str, int], dict[str, float]] = {}
    for one in scores:
        if one.memory is Memory.WHOLE and one.reader in (TORCH, Precision.EXACT.value):
            groups.setdefault((one.task, one.distance_tokens), {})[one.reader] = one.answer
    both = [found for found in groups.values() if len(found) > 1]
    if not both:
        return Claim(name, None, "of groups", None, None, reason)
    equal = fmean(len(set(found.values())) == 1 for found in both)
    return Claim.measured(name, equal, "of groups", f"{len(both)} tasks and distances, exact precision against torch")


class Student:
    """Reads a conversation and is asked."""

    def __init__(self, stepper: Stepper, chat: ChatFormat) -> None:
        self._stepper = stepper
        self._chat = chat

    def answers(self, case: Case, memory: Memory = Memory.WHOLE) -> tuple[bool, bool]:
        """Whether the whole sentence comes out right, and whether its value does (given the words before each token).

        The sentence's tokens are fed as they should be, and each is held against the likeliest one: all being right is
        the same as greedy decoding writing just this sentence.
        """
        stepper = self._stepper
        # The last token of the prompt is read after the damage: the logits of before would still know the answer.
        cut = case.memory_tokens if memory is Memory.NO_KDA_OF_NOTEBOOK else len(case.prompt) - 1
        state = stepper.run(case.prompt[:cut])
        if memory is not Memory.WHOLE:
            state = self._without(state, memory)
        return self.answers_after(state, case, cut)

    def answers_after(self, state: State, case: Case, read_tokens: int) -> tuple[bool, bool]:
        """As `answers`, by a state that has read so many tokens of the case's prompt and reads the rest now.

        Takes over the caller's reference to `state`.
        """
        stepper, chat = self._stepper, self._chat
        state = stepper.run(case.prompt[read_tokens:], after=state)
        answer = chat.tokenizer.encode(case.answer)
        right = []
        for token in [*answer, chat.tokenizer.token_id(CLOSE)]:
            if state.logits is None:
                raise AssertionError("a state after tokens has logits")
            right.append(int(np.argmax(state.logits.array)) == token)
            state = stepper.run(np.array([token], np.int32), after=state)
        state.release()
        return all(right), all(right[place] for place in self._value_places(case, answer))

    def _value_places(self, case: Case, answer: Sequence[int]) -> list[int]:
        """Which tokens of the answer write some of the value (the language is ASCII: a byte is a character)."""
        ends = np.cumsum([len(self._chat.tokenizer.token_bytes(token)) for token in answer])
        starts = np.concatenate([[0], ends[:-1]])
        end = case.value_start + len(case.value)
        return [
            place for place, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > case.value_start and a < end
        ]

    def _without(self, state: State, memory: Memory) -> State:
        """A copy of the state that lacks one kind of memory. Takes over the caller's reference to `state`."""
        pool = self._stepper.pool
        left = damaged(snapshot_of(pool.layout, state), memory)
        draft = pool.draft(pool.empty(), left.position, with_logits=True)
        fill(draft, pool.layout, left)
        state.release()
        return draft.commit()


def damaged(snapshot: Snapshot, memory: Memory) -> Snapshot:
    """The snapshot with zeros for its KDA matrices, or cut down to the latents of its first tokens.

    No layer of the model counts positions, so a state with fewer latents is one that has read less by attention.
    """
    match memory:
        case Memory.WHOLE:
            return snapshot
        case Memory.NO_KDA | Memory.NO_KDA_OF_NOTEBOOK:
            return replace(snapshot, kda=np.zeros_like(snapshot.kda))
        case Memory.NO_LATENTS:
            rows = min(LEFT_LATENTS, snapshot.position)
            pages = tuple(LatentPage(page.rows[:, :rows]) for page in snapshot.pages[:1])
            return replace(snapshot, position=rows, pages=pages)
