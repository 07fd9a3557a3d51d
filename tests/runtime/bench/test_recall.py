"""`serai bench recall`: its cases are what they say, and a right answer is told from a wrong one."""

from collections.abc import Iterator

import numpy as np
import pytest

from serai.checkpoints.harness.samples import sample_state
from serai.runtime.bench import recall
from serai.runtime.bench.recall import Memory, Plan, Student, damaged
from serai.runtime.bench.recall_cases import TASKS, cases
from serai.runtime.bench.recall_facts import ATTRIBUTES, chance
from serai.runtime.chat import ChatFormat, chat_format_for
from serai.runtime.checks.stepping import Stepper
from serai.runtime.models.open_model import Precision, find_model, load_model
from serai.runtime.state import StatePool


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatFormat]:
    found = find_model("nano")
    assert found.tokenizer is not None
    yield chat_format_for(found.config.family.value, found.tokenizer)
    found.files.close()


def text_of(ids: list[int], chat: ChatFormat) -> str:
    return b"".join(chat.tokenizer.token_bytes(token, control=True) for token in ids).decode()


@pytest.mark.parametrize("task", TASKS)
def test_every_case_asks_at_about_the_distance_it_was_asked_for(task: str, chat: ChatFormat) -> None:
    for case in cases(task, 512, 3, chat):
        assert abs(case.distance_tokens - 512) < 60
        assert case.answer[case.value_start :].startswith(case.value)
        text = text_of(case.prompt.tolist(), chat)
        memory = text_of(case.prompt[: case.memory_tokens].tolist(), chat)
        assert text.endswith("<|open|>response<|sep|>")
        assert memory.endswith("message<|sep|><|end_of_msg|>")
        assert text[len(memory) :].count("<|end_of_msg|>") == 1
        assert (case.value in memory) == (task not in ("absent", "count"))
        assert 0 < case.chance <= 1


def test_cases_are_the_same_every_time_and_differ_from_each_other(chat: ChatFormat) -> None:
    one, again = cases("recall", 256, 4, chat), cases("recall", 256, 4, chat)
    assert [case.prompt.tobytes() for case in one] == [case.prompt.tobytes() for case in again]
    assert len({case.prompt.tobytes() for case in one}) == 4


def test_an_unknown_task_is_named(chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match="unknown task 'poetry'; it must be one of recall"):
        cases("poetry", 256, 1, chat)


def test_no_attribute_is_easily_guessed() -> None:
    assert max(chance(attribute) for attribute in ATTRIBUTES) <= 0.05


def test_damage_takes_one_kind_of_memory_and_leaves_the_other() -> None:
    whole = sample_state(10)
    no_kda, no_latents = damaged(whole, Memory.NO_KDA), damaged(whole, Memory.NO_LATENTS)
    assert not no_kda.kda.any()
    assert no_kda.pages == whole.pages
    assert no_latents.position == recall.LEFT_LATENTS
    assert np.array_equal(no_latents.kda, whole.kda)
    assert np.array_equal(no_latents.pages[0].rows, whole.pages[0].rows[:, : recall.LEFT_LATENTS])
    assert damaged(whole, Memory.WHOLE) is whole


def test_the_nano_model_is_judged_as_greedy_decoding_would_judge_it(chat: ChatFormat) -> None:
    found = find_model("nano")
    try:
        loaded = load_model(found, Precision.FAST, max_rows=128)
        stepper = Stepper(loaded, StatePool(loaded.layout, poison=True))
        for case in cases("recall", 64, 3, chat):
            state = stepper.run(case.prompt)
            written: list[int] = []
            while len(written) <= len(chat.tokenizer.encode(case.answer)):
                assert state.logits is not None
                written.append(int(np.argmax(state.logits.array)))
                state = stepper.run(np.array(written[-1:], np.int32), after=state)
            state.release()
            wrote_it = text_of(written, chat) == case.answer + "<|close|>"
            student = Student(stepper, chat)
            assert student.answers(case)[0] is wrote_it
        assert stepper.pool.live_bytes == 0
        loaded.model.close()
    finally:
        found.files.close()


def test_without_either_kind_of_memory_the_answers_are_lost(chat: ChatFormat) -> None:
    """Whoever has lost the KDA matrices or the latents when the answer is due does clearly worse: both are used."""
    found = find_model("nano")
    try:
        loaded = load_model(found, Precision.FAST, max_rows=256)
        student = Student(Stepper(loaded, StatePool(loaded.layout)), chat)
        some = cases("recall", 1024, 12, chat)
        right = {memory: sum(student.answers(case, memory)[0] for case in some) for memory in Memory}
        loaded.model.close()
    finally:
        found.files.close()
    assert right[Memory.WHOLE] >= 10
    assert max(right[Memory.NO_KDA], right[Memory.NO_LATENTS]) <= 6


def test_the_claims_stand_beside_chance_and_name_what_was_not_asked() -> None:
    plan = Plan(("recall",), {1024: 1}, (), {})
    report = recall.bench_recall(quick=True, tell=lambda _: None, plan=plan)
    claims = {claim.name: claim for claim in report.claims}
    assert "chance 0.0" in claims["recall_1k"].detail
    assert claims["recall_1k"].value in (0.0, 1.0)
    assert claims["recall_4k"].value is None
    assert claims["recall_4k"].holds is None
    readers = [row["reader"] for row in report.table]
    assert readers[:2] == ["exact", "fast"]
    peer = claims["recall_equals_torch"]
    if readers[2:]:
        assert readers[2:] == ["torch"]
        assert peer.value == 1.0
    else:
        assert peer.value is None
        assert peer.detail in ("torch is not installed", "the trainer, examples/train_nano, is in the repository only")
