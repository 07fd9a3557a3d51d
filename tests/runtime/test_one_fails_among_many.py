"""B14: sessions that come, go and fail in the same steps leave each other's bits alone, with real kernels."""

from dataclasses import replace

import anyio
import numpy as np
import pytest

from serai.runtime import Runtime, SamplingParams, open_runtime
from serai.runtime.errors import LogitsInvalid
from serai.runtime.models.open_model import Precision
from serai.runtime.services import Policy
from serai.runtime.step import SegmentResult, Slice, StepEngine, StepPlan, StepResult

pytestmark = pytest.mark.anyio

LENGTHS = (3, 17, 50)
STEPS = 200
CURSED = 999
"""A token that no session but the failing one reads."""

ALONE = Policy(reuse=False, guess=False)


class Failing:
    """An engine in which whoever reads `CURSED` fails, after the step was computed for all."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.shared = 0

    def go_on(self, plan: StepPlan, turn: Slice) -> StepResult | None:
        return self._engine.go_on(plan, turn)

    def step(self, plan: StepPlan) -> StepResult:
        result = self._engine.step(plan)
        cursed = [CURSED in segment.tokens for segment in plan.segments]
        self.shared += any(cursed) and not all(cursed)
        return replace(
            result,
            segments=tuple(
                SegmentResult(error=LogitsInvalid("cursed")) if is_cursed else outcome
                for is_cursed, outcome in zip(cursed, result.segments, strict=True)
            ),
        )


def prompt_of(number: int, length: int) -> list[int]:
    """Every session has a marker of its own first; none is cursed."""
    return [900 + number, *np.random.default_rng(number).integers(0, 900, length - 1).tolist()]


def params_of(number: int, count: int = STEPS) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=number, max_tokens=count, ignore_eos=True, logit_bias={CURSED: -100.0})


async def said_and_bits(rt: Runtime, number: int, length: int) -> tuple[list[int], bytes]:
    async with await rt.session(namespace=str(number)) as session:
        await session.append(prompt_of(number, length))
        await session.generate(params_of(number)).collect()
        return session.tokens().tolist(), (await session.logits()).tobytes()


@pytest.mark.parametrize("precision", Precision)
async def test_errors_joins_and_leaves_among_200_steps_change_nobodys_bits(precision: Precision) -> None:
    failures, joined = 0, 0
    async with open_runtime("nano", budget="1GiB", precision=precision, policy=ALONE) as rt:
        alone = [await said_and_bits(rt, number, length) for number, length in enumerate(LENGTHS)]
        engines: list[Failing] = []

        def failing(engine: StepEngine) -> Failing:
            engines.append(Failing(engine))
            return engines[0]

        rt.wrap_engine(failing)
        together: dict[int, tuple[list[int], bytes]] = {}

        async def one(number: int, length: int) -> None:
            together[number] = await said_and_bits(rt, number, length)

        async def come_and_go() -> None:
            nonlocal joined
            while True:
                async with await rt.session() as session:
                    await session.append(prompt_of(10, 5 + joined % 7))
                    await session.generate(params_of(10, 1 + joined % 5)).collect()
                joined += 1

        async def fail() -> None:
            nonlocal failures
            async with await rt.session() as session:
                await session.append(prompt_of(11, 9))
                before = (await session.logits()).tobytes()
                while True:
                    with pytest.raises(LogitsInvalid, match="cursed"):
                        await session.append([1, CURSED, 2])
                    failures += 1
                    assert (session.position, (await session.logits()).tobytes()) == (9, before)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_and_go)
            tasks.start_soon(fail)
            async with anyio.create_task_group() as working:
                for number, length in enumerate(LENGTHS):
                    working.start_soon(one, number, length)
            tasks.cancel_scope.cancel()
    assert [together[number] for number in range(len(LENGTHS))] == alone
    assert failures > STEPS // 4
    assert engines[0].shared > STEPS // 4, "it failed in steps of the others"
    assert joined > 10
