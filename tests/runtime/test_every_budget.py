"""The bits are the same for every budget from the floor to all in memory, page cache cold or warm, packed or direct, on
a slow disk, and while signals arrive: on nano, and on a small model of either layout."""

import ctypes
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from serai.runtime import SamplingParams, blocking
from serai.runtime.bench.raw_disk import drop_page_cache
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, write_tiny_model
from serai.runtime.checks.evaluation import evaluate
from serai.runtime.checks.stepping import Stepper, Tokens
from serai.runtime.experts import source as sources
from serai.runtime.experts.disk import DiskCalls, DiskFiles, ReadMode
from serai.runtime.experts.pack import pack_model
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.memory.plan import MemoryPlan, plan_memory
from serai.runtime.models.locate import BUILT_IN
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.models.scratch import kernel_scratch_bytes
from serai.runtime.opening import LEAST_CONTEXT_TOKENS, expert_room
from serai.runtime.scheduler import Limits
from serai.runtime.state import StatePool
from tests.runtime.experts.faults import NoDirect, SlowReads

PROMPT = np.random.default_rng(6).integers(0, 1000, 30).astype(np.int32)
GREEDY_TOKENS = 96
BUDGETS = 4
"""From the floor to one byte under everything, as far apart as can be; and all in memory."""


@pytest.fixture(scope="module", params=["nano", "k3", "linear"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "nano":
        return BUILT_IN["nano"]
    folder = tmp_path_factory.mktemp("models") / "model"
    write_tiny_model(folder, {"k3": TINY_K3, "linear": TINY_LINEAR}[request.param], shards=2)
    return folder


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "p"
    found = find_model(model)
    pack_model(found.config, found.files, found.prefix, folder)
    found.files.close()
    return folder


@contextmanager
def reading(calls: DiskCalls | None) -> Iterator[None]:
    """Experts are read through these calls."""

    def files(paths: Sequence[Path], given: DiskCalls | None = None) -> DiskFiles:
        return DiskFiles(paths, calls or given)

    with patch.object(sources, "DiskFiles", files):
        yield


@contextmanager
def loaded(folder: Path, slots: int | None, calls: DiskCalls | None = None) -> Iterator[LoadedModel]:
    found = find_model(folder)
    with reading(calls):
        one = load_model(found, Precision.FAST, max_rows=32, expert_slots=slots)
    try:
        yield one
        if isinstance(one.model.experts, StreamedExperts):
            one.model.experts.check()
            assert one.model.experts.status.reads.read_bytes > 0
    finally:
        one.model.close()
        found.files.close()


def answer(folder: Path, slots: int | None, calls: DiskCalls | None = None) -> dict[str, bytes]:
    """Every logit three ways, 96 greedy tokens and the state."""
    with loaded(folder, slots, calls) as one:
        arrays = evaluate(one, PROMPT, 20, greedy=GREEDY_TOKENS)
        assert len(arrays["greedy"]) == GREEDY_TOKENS
        return {name: array.tobytes() for name, array in arrays.items()}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, bytes]:
    return answer(model, None)


def plan_of(folder: Path) -> MemoryPlan:
    found = find_model(folder)
    rows = Limits().step_rows
    plan = plan_memory(
        found.config,
        found.files,
        context_tokens=LEAST_CONTEXT_TOKENS,
        step_rows=rows,
        kernel_scratch_bytes=kernel_scratch_bytes(found.config, rows, fast=True),
    )
    found.files.close()
    return plan


def test_every_budget_gives_the_same_bits(model: Path, expected: dict[str, bytes]) -> None:
    """B13: the slots that opening chooses from the floor up, and one slot, which no budget gives."""
    plan = plan_of(model)
    floor, everything = plan.streaming_floor_bytes.bfloat16, plan.floor_bytes.bfloat16
    found = find_model(model)
    budgets = [int(budget) for budget in np.linspace(floor, everything - 1, BUDGETS)]
    slots = [expert_room(found, Precision.FAST, budget).slots for budget in (*budgets, everything)]
    found.files.close()
    assert slots[0] == plan.min_expert_slots
    assert slots[-1] is None
    chosen = sorted({count for count in slots if count is not None})
    assert len(chosen) > 1
    for count in (1, *chosen):
        assert answer(model, count) == expected, f"{count} slots"


@pytest.mark.parametrize("form", ["direct", "packed"])
@pytest.mark.parametrize("cache", ["cold", "warm", "passed by"])
def test_the_page_cache_changes_no_bit(
    model: Path, packed: Path, expected: dict[str, bytes], form: str, cache: str
) -> None:
    """B13: buffered reads with the files' pages dropped before, with all of them in memory, and direct reads."""
    folder = model if form == "direct" else packed
    if cache == "cold":
        drop_page_cache(folder)
    else:
        for file in folder.glob("*.safetensors"):
            file.read_bytes()
    calls = DiskCalls() if cache == "passed by" else NoDirect(at_open=True)
    with loaded(folder, 3, calls) as one:
        assert isinstance(one.model.experts, StreamedExperts)
        wanted = ReadMode.BUFFERED if cache != "passed by" else one.model.experts.status.mode
        assert one.model.experts.status.mode is wanted
        evaluate(one, PROMPT[:2], 1, greedy=1)
    assert answer(folder, 3, calls) == expected
    if (form, cache) == ("packed", "cold"):
        assert answer(folder, None, calls) == expected


def test_two_sessions_on_a_slow_disk_with_two_slots_say_what_they_say_in_memory(model: Path) -> None:
    """B12: 50 steps at once over a cache of two slots; slower, never wrong, and never over the budget."""
    prompts = [PROMPT[:5], PROMPT[5:12]]
    with loaded(model, None) as one:
        alone = steps(one, prompts)
    with loaded(model, 2, SlowReads()) as one:
        experts = one.model.experts
        assert isinstance(experts, StreamedExperts)
        assert steps(one, prompts) == alone
        assert experts.cache.nbytes == 2 * experts.layout.record_bytes
        assert experts.cache.resident_bytes <= experts.cache.nbytes


def steps(one: LoadedModel, prompts: list[Tokens]) -> list[bytes]:
    """The logits of both sessions after each of 50 common steps, in which each is fed its likeliest token."""
    stepper = Stepper(one, StatePool(one.layout))
    states, _ = stepper.feed([(stepper.pool.empty(), prompt) for prompt in prompts])
    made = []
    for _ in range(50):
        rows = [state.logits.array for state in states if state.logits is not None]
        made += [row.tobytes() for row in rows]
        following = [np.array([int(row.argmax())], dtype=np.int32) for row in rows]
        states, _ = stepper.feed(list(zip(states, following, strict=True)))
        if isinstance(one.model.experts, StreamedExperts):
            one.model.experts.check()
    for state in states:
        state.release()
    return made


@contextmanager
def signals(number: int) -> Iterator[list[int]]:
    """One handled about every millisecond; a child's end is told to each thread of the process in turn, so that calls
    of readers, savers and kernels are interrupted, and not the main thread's alone."""
    handled: list[int] = []
    ended = threading.Event()
    kill_thread = ctypes.CDLL(None).tgkill

    def tell_each_thread() -> None:
        while not ended.wait(0.001):
            for task in Path("/proc/self/task").iterdir():
                kill_thread(os.getpid(), int(task.name), number)  # one that has ended is no error

    before = signal.signal(number, lambda number, _: handled.append(number))
    thread = threading.Thread(target=tell_each_thread)
    try:
        if number == signal.SIGALRM:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        else:
            thread.start()
        yield handled
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        ended.set()
        if thread.ident is not None:
            thread.join()
        signal.signal(number, before)


@pytest.mark.skipif(sys.platform != "linux", reason="sends signals to single threads as Linux has it")
@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGCHLD])
def test_signals_change_neither_what_is_said_nor_what_is_written(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """B124: experts are read and sessions saved while a signal is handled every millisecond."""
    quiet = said_and_written(model, tmp_path / "quiet")
    with signals(number) as handled:
        disturbed = said_and_written(model, tmp_path / "disturbed")
    assert len(handled) > 20
    assert disturbed == quiet


def said_and_written(model: Path, store: Path) -> tuple[tuple[int, ...], set[str]]:
    """A session's tokens under the smallest budget, and the hashes of the parts it left in the store."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with blocking.open_runtime(model, budget=plan_of(model).streaming_floor_bytes.bfloat16, store=store) as rt:
        session = rt.session()
        session.append(PROMPT.tolist())
        tokens = tuple(session.generate(params).collect().tokens)
        session.pause()
    parts = {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file() and "parts" in path.parts
    }
    assert parts
    return tokens, parts
