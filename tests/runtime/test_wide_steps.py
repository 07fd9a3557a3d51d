"""Thousands of prompt tokens read layer by layer have the bits of any other way to read them, and starve no answer."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from serai.runtime import SamplingParams, open_runtime
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, ExpertType, TinyModel, write_tiny_model
from serai.runtime.checks.stepping import Stepper
from serai.runtime.engine import Engine
from serai.runtime.experts.errors import ExpertUnreadable
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.memory.plan import WIDE_ROWS
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.models.scratch_shape import ScratchShape
from serai.runtime.opening import expert_room
from serai.runtime.services import Policy
from serai.runtime.state import StatePool
from serai.runtime.step import AbortFlag, Segment, Slice, StepPlan, StepResult
from tests.runtime.floors import floors

pytestmark = pytest.mark.anyio

ROWS = 16
WIDE = 200
LENGTHS = (3, 70, 1, 16, 45)
PROMPTS = [np.random.default_rng(n).integers(0, 96, length).astype(np.int32) for n, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[TINY_K3, TINY_LINEAR, None], ids=["packed", "plain", "nano"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str | Path:
    shape: TinyModel | None = request.param
    if shape is None:
        return "nano"
    folder = tmp_path_factory.mktemp("models") / "model"
    write_tiny_model(folder, shape)
    return folder


@contextmanager
def loaded(model: str | Path, precision: Precision, slots: int | None) -> Iterator[LoadedModel]:
    found = find_model(model)
    held = load_model(found, precision, max_rows=ROWS, wide_rows=WIDE, expert_slots=slots)
    try:
        yield held
    finally:
        held.model.close()
        found.files.close()


def together(held: LoadedModel, pool: StatePool, engine: Engine) -> tuple[StepPlan, StepResult | None]:
    """The plan that feeds all prompts in one wide step, each after some tokens of its own, and its first slice."""
    stepper = Stepper(held, pool)
    states = [stepper.run(prompt[: number % 3]) for number, prompt in enumerate(PROMPTS)]
    segments = []
    for number, (state, prompt) in enumerate(zip(states, PROMPTS, strict=True)):
        rest = prompt[number % 3 :]
        if len(rest):
            segments.append(Segment(state, rest, pool.draft(state, len(rest), with_logits=True)))
    plan = StepPlan(tuple(segments), AbortFlag())
    return plan, engine.go_on(plan, Slice(is_over=True))


@pytest.mark.parametrize("precision", Precision)
def test_a_wide_step_has_the_bits_of_ordinary_ones(model: str | Path, precision: Precision) -> None:
    """Whatever is resident, and though other steps are run in its pauses."""
    with loaded(model, precision, None) as resident:
        stepper = Stepper(resident, StatePool(resident.layout))
        expected = [stepper.ended(stepper.run(prompt)) for prompt in PROMPTS]
        moe = resident.model.config.moe
        assert moe is not None
    for slots in (None, 3 * moe.experts, 2):
        with loaded(model, precision, slots) as held:
            pool = StatePool(held.layout, poison=True)
            engine, stepper = Engine(held.model, held.layout), Stepper(held, pool)
            plan, result = together(held, pool, engine)
            slices = 1
            while result is None:
                if slices % 50 == 0:
                    assert stepper.ended(stepper.run(PROMPTS[1], (3, 16, 16, 16, 16, 3))) == expected[1]
                result = engine.go_on(plan, Slice(is_over=True))
                slices += 1
            assert slices > len(held.model.weights.layers)
            assert all(one.error is None for one in result.segments)
            fed = {id(segment.tokens.base): segment for segment in plan.segments}
            for prompt, bits in zip(PROMPTS, expected, strict=True):
                draft = fed[id(prompt)].draft if id(prompt) in fed else None
                if draft is not None:
                    assert stepper.bits(draft.commit()) == bits
            if isinstance(held.model.experts, StreamedExperts):
                held.model.experts.check()


def test_a_wide_step_reads_a_layers_experts_once(model: str | Path) -> None:
    with loaded(model, Precision.FAST, 8) as held:
        experts = held.model.experts
        assert isinstance(experts, StreamedExperts)
        engine = Engine(held.model, held.layout)
        plan, result = together(held, StatePool(held.layout), engine)
        before = experts.status
        while result is None:
            result = engine.go_on(plan, Slice())
        reads = experts.status.reads.reads - before.reads.reads
        assert reads <= len(experts.cache.layers) * experts.cache.experts


def test_a_wide_step_that_nobody_wants_any_more_leaves_nothing_in_use(model: str | Path) -> None:
    with loaded(model, Precision.FAST, 8) as held:
        engine = Engine(held.model, held.layout)
        plan, result = together(held, StatePool(held.layout), engine)
        while result is None and not experts_in_use(held):
            result = engine.go_on(plan, Slice(is_over=True))
        plan.abort.set()
        ended = engine.go_on(plan, Slice())
        assert ended is not None
        assert ended.aborted
        assert isinstance(held.model.experts, StreamedExperts)
        held.model.experts.check()


def test_an_expert_that_cannot_be_read_ends_the_prompts_that_picked_it_and_no_other(
    model: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(model, Precision.FAST, None) as resident:
        stepper = Stepper(resident, StatePool(resident.layout))
        expected = [stepper.ended(stepper.run(prompt)) for prompt in PROMPTS]
    with loaded(model, Precision.FAST, 8) as held:
        experts = held.model.experts
        assert isinstance(experts, StreamedExperts)
        read, broken = type(experts.source).read, [(-1, -1)]

        def fails(self: object, layer: int, expert: int, record: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> int:
            if (layer, expert) in broken:
                raise OSError(errno.EIO, "Input/output error")
            return read(experts.source, layer, expert, record, scratch)

        monkeypatch.setattr(type(experts.source), "read", fails)
        pool = StatePool(held.layout, poison=True)
        engine, stepper = Engine(held.model, held.layout), Stepper(held, pool)
        failed: list[int] = []
        for expert in range(experts.cache.experts):
            broken[0] = experts.cache.layers[0], expert
            states = [pool.empty() for _ in PROMPTS]
            drafts = [pool.draft(*one, with_logits=True) for one in zip(states, map(len, PROMPTS), strict=True)]
            result = engine.go_on(StepPlan(tuple(map(Segment, states, PROMPTS, drafts)), AbortFlag()), Slice())
            assert result is not None
            failed.append(0)
            for one, draft, bits in zip(result.segments, drafts, expected, strict=True):
                if one.error is None:
                    assert stepper.ended(draft.commit()) == bits
                else:
                    assert isinstance(one.error, ExpertUnreadable)
                    failed[-1] += 1
                    draft.abandon()
            experts.check()
        assert any(0 < count < len(PROMPTS) for count in failed), failed


def experts_in_use(held: LoadedModel) -> bool:
    assert isinstance(held.model.experts, StreamedExperts)
    return bool(held.model.experts.visits)


def test_the_plan_counts_the_memory_of_wide_steps(model: str | Path) -> None:
    with loaded(model, Precision.FAST, 8) as held:
        planned = ScratchShape.of(held.model.config).wide_bytes(WIDE)
        assert held.model.scratch_bytes - held.model.scratch.bytes == planned


async def test_a_streaming_runtime_reads_long_prompts_wide_and_says_the_same(tmp_path: Path) -> None:
    """Beside sessions that answer; as the budget with everything in memory has it."""
    large = replace(TINY_K3, expert_type=ExpertType.MXFP4, experts=64, expert_inner=512, expert_latent=256)
    write_tiny_model(tmp_path / "m", large)
    _, whole = floors(tmp_path / "m")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, 400) for _ in range(3)]
    said = []
    for budget in (whole + (16 << 20), whole - 1):
        async with open_runtime(tmp_path / "m", budget=budget, policy=Policy(reuse=False, guess=False)) as rt:
            driver = rt._services.driver
            assert (driver.limits.wide_rows == WIDE_ROWS) == (budget < whole)
            answers: dict[int, tuple[int, ...]] = {}

            async def read(number: int, into: dict[int, tuple[int, ...]]) -> None:
                session = await rt.session()
                await session.append(prompts[number])
                params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
                into[number] = (await session.generate(params).collect()).tokens

            with patch.object(driver.engine, "go_on", wraps=driver.engine.go_on) as went_on:
                async with anyio.create_task_group() as tasks:
                    for number in range(len(prompts)):
                        tasks.start_soon(read, number, answers)
            assert went_on.called == (budget < whole)
            said.append(answers)
    assert said[0] == said[1]


def test_wide_steps_get_memory_only_where_there_is_plenty(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", TINY_K3)
    least, _ = floors(tmp_path / "m")
    found = find_model(tmp_path / "m")
    assert expert_room(found, Precision.FAST, least).wide_rows == 0
    found.files.close()
