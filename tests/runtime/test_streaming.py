"""A model whose experts are read when they are routed gives the bits of one that is all in memory."""

from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.runtime import SamplingParams, open_runtime
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, TinyModel, write_tiny_model
from serai.runtime.checks.evaluation import WAYS, evaluate
from serai.runtime.errors import BudgetTooSmall, SeraiError
from serai.runtime.experts.errors import ExpertUnreadable
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.memory.residency import Tier
from serai.runtime.models.open_model import Precision, find_model, load_model
from tests.runtime.floors import floors

pytestmark = pytest.mark.anyio

TOKENS = np.random.default_rng(4).integers(0, 1000, 60).astype(np.int32)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=[TINY_K3, TINY_LINEAR], ids=["packed", "plain"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: TinyModel = request.param
    folder = tmp_path_factory.mktemp("models") / "model"
    write_tiny_model(folder, shape, shards=3)
    return folder


@pytest.mark.parametrize("precision", Precision)
def test_the_bits_are_the_same_for_every_number_of_slots(model: Path, precision: Precision) -> None:
    """B13: all in memory, most, a few, and as few as one token needs in a layer; guesses change nothing."""
    found = find_model(model)
    whole = load_model(found, precision, max_rows=16)
    expected = evaluate(whole, TOKENS, 40, 8)
    assert found.config.moe is not None
    for slots in (found.config.moe.experts * 3, 9, found.config.moe.experts_per_token):
        loaded = load_model(found, precision, max_rows=16, expert_slots=slots)
        got = evaluate(loaded, TOKENS, 40, 8)
        for name in (*WAYS, "greedy"):
            np.testing.assert_array_equal(got[name], expected[name], err_msg=f"{name} with {slots} slots")
        experts = loaded.model.experts
        assert isinstance(experts, StreamedExperts)
        experts.check()
        assert experts.status.slots == slots
        assert experts.status.reads.read_bytes > 0
        loaded.model.close()


async def test_the_budget_decides_what_is_held_and_no_token(model: Path) -> None:
    """From the floor up; under it, a refusal by name before anything is loaded."""
    least, all_in_memory = floors(model)
    given = []
    for budget in (least, (least + all_in_memory) // 2, all_in_memory):
        async with open_runtime(model, budget=budget) as rt:
            said = []
            for number in range(2):  # one at a time, as the floor has it
                async with await rt.session() as session:
                    await session.append(TOKENS[: 30 + number])
                    said.append((await session.generate(GREEDY).collect()).tokens)
            given.append(said)
            status = rt.status()
            assert status.budget.used_bytes <= budget
            assert (status.experts is None) == (budget == all_in_memory)
            if status.experts is not None:
                assert status.experts.misses > 0
                assert status.experts.mode in ("direct", "buffered")
                assert status.experts.reads_in_flight >= 1
    assert given[0] == given[1] == given[2]
    async with open_runtime(model, budget=2 * all_in_memory) as rt:  # room for both to be live at once
        sessions = [await rt.session() for _ in range(2)]
        together: list[tuple[int, ...]] = [(), ()]

        async def live(number: int) -> None:
            await sessions[number].append(TOKENS[: 30 + number])
            together[number] = (await sessions[number].generate(GREEDY).collect()).tokens

        async with anyio.create_task_group() as tasks:
            for number in range(2):
                tasks.start_soon(live, number)
        assert together == given[0]
        assert all(session.tier is Tier.HOT for session in sessions)
        assert rt.status().budget.used_bytes <= 2 * all_in_memory
    with pytest.raises(BudgetTooSmall, match=f"{least:,} bytes"):
        async with open_runtime(model, budget=least - 1):
            pytest.fail("it was opened")


async def test_saving_and_loading_sessions_costs_no_expert_its_place(model: Path, tmp_path: Path) -> None:
    """B125: what a turn finds of the experts in memory is the same after a checkpoint was written and read; what the
    others cost, the status tells in bytes and seconds."""
    least, all_in_memory = floors(model)
    turn = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async with open_runtime(model, budget=(least + all_in_memory) // 2, store=tmp_path) as rt:
        session = await rt.session()
        await session.append(TOKENS[:20])
        for _ in range(4):
            before = rt.status().experts
            session = await rt.resume(await session.pause())
            after = rt.status().experts
            assert before is not None
            assert after is not None
            assert (after.hits, after.misses) == (before.hits, before.misses)
            held = zip(before.layers, after.layers, strict=True)
            assert all(now.held >= then.held for then, now in held), "what was on its way then may have come"
            await session.generate(turn).collect()
            assert after.read_bytes > 0
            assert after.read_s > 0


@pytest.fixture
def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


async def test_a_file_cut_short_ends_the_sessions_that_needed_it_and_no_process(
    model: Path, shards: list[Path]
) -> None:
    """B25: the next read of an expert that isn't held fails in its session; what is held goes on being used."""
    least, all_in_memory = floors(model)
    async with open_runtime(model, budget=(least + all_in_memory) // 2) as rt:
        survivor = await rt.session()
        await survivor.append(TOKENS[:1])
        whole = {path: path.read_bytes() for path in shards}
        try:
            for path in whole:
                with path.open("r+b") as file:
                    file.truncate(2_000)
            errors: list[SeraiError] = []

            async def doomed(seed: int) -> None:
                session = await rt.session()
                ids = np.random.default_rng(seed).integers(0, 1000, 12)
                try:
                    await session.append(ids)
                except SeraiError as error:
                    errors.append(error)
                assert session.position in (0, 12)

            async with anyio.create_task_group() as tasks:
                for seed in range(3):
                    tasks.start_soon(doomed, seed)
            assert errors
            assert {type(error) for error in errors} == {ExpertUnreadable}
            assert "restore the file" in str(errors[0])
        finally:
            for path, data in whole.items():
                path.write_bytes(data)
        assert survivor.position == 1
        await survivor.append(TOKENS[1:20])
        assert len((await survivor.generate(GREEDY).collect()).tokens) == 24
