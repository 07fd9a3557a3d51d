"""The whole runtime over a real model, nano or a random one, in both precisions: what the scripted model can't show."""

import ctypes
import ctypes.util
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.checkpoints.snapshot import LatentType
from serai.kernels import compile as kernels
from serai.kernels.kda_panels import to_matrices
from serai.runtime import SamplingParams, Session, open_runtime
from serai.runtime.bench.killed import PROMPT, TOKENS, go
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, TinyModel, write_tiny_model
from serai.runtime.checks.stepping import Stepper
from serai.runtime.models.locate import BUILT_IN
from serai.runtime.models.open_model import Precision, find_model, load_model
from serai.runtime.state import StatePool, fill, kda_view, snapshot_of
from tests.kernels.naive_model import Model, load
from tests.shared import ROOT

pytestmark = pytest.mark.anyio

SAMPLED = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=150)


@pytest.fixture
def model() -> Path:
    return BUILT_IN["nano"]


def cut_at(count: int, params: SamplingParams = SAMPLED) -> SamplingParams:
    return SamplingParams.from_record({**params.to_record(), "max_tokens": count})


@pytest.mark.parametrize("precision", Precision)
async def test_pausing_at_any_boundary_changes_no_bit(model: Path, tmp_path: Path, precision: Precision) -> None:
    """B42, B43: 300 tokens, read and sampled in turns with penalties and seeds; every boundary, those within a prompt
    and right after a sampled token among them, is resumed in another process."""
    points, logits = [], []
    async with open_runtime(model, budget="1GiB", store=tmp_path / "store", precision=precision) as rt:
        whole = await rt.session()
        await whole.append(PROMPT)
        await go(whole, 0, TOKENS)
        expected = whole.tokens()
        assert len(expected) == len(PROMPT) + TOKENS == len(PROMPT) + 300
        walker = await rt.session()
        await walker.append(PROMPT)
        for at in range(TOKENS):
            logits.append(await walker.logits())
            points.append((await walker.pause()).id)
            walker = await rt.resume(points[-1])
            await go(walker, at, at + 1)
    np.savez(tmp_path / "walk.npz", points=points, logits=np.array(logits), expected=expected)
    elsewhere = [sys.executable, "-m", "tests.runtime.resume_elsewhere", str(model), str(tmp_path), precision.value]
    done = await anyio.run_process(elsewhere, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "300 resumed, 0 tokens computed again\n"


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("shape", [TINY_K3, TINY_LINEAR], ids=["k3", "linear"])
def test_every_split_of_a_prompt_gives_the_same_state(shape: TinyModel, tmp_path: Path, precision: Precision) -> None:
    """B02: all 199 ways to cut 200 tokens in two, and thirty to cut them in many; every bit of the state counts."""
    write_tiny_model(tmp_path, shape)
    found = find_model(tmp_path)
    try:
        loaded = load_model(found, precision, max_rows=len(PROMPT))
        stepper = Stepper(loaded, StatePool(loaded.layout, poison=True))
        tokens, rng = np.array(PROMPT, np.int32), np.random.default_rng(8)
        whole = stepper.ended(stepper.run(tokens))
        cuts = [[at] for at in range(1, len(tokens))]
        cuts += [sorted(rng.choice(np.arange(1, len(tokens)), rng.integers(2, 40), replace=False)) for _ in range(30)]
        for cut in cuts:
            sizes = np.diff([0, *cut, len(tokens)]).tolist()
            assert stepper.ended(stepper.run(tokens, sizes)) == whole, sizes
    finally:
        found.files.close()


def test_the_callers_rounding_mode_changes_no_bit_and_is_left_as_it_was(model: Path) -> None:
    """Contract, c: whatever a library has set in the thread that steps, the kernels' own mode is what counts."""
    upward = 0x800 if platform.machine() in ("x86_64", "AMD64") else 0x400000
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    found = find_model(model)
    try:
        loaded = load_model(found, Precision.EXACT, max_rows=64)
        stepper = Stepper(loaded, StatePool(loaded.layout))
        tokens = np.array(PROMPT, np.int32)
        usual = stepper.ended(stepper.run(tokens))

        def rounding_up() -> tuple[bytes, int]:
            assert libm.fesetround(upward) == 0
            return stepper.ended(stepper.run(tokens)), libm.fegetround()

        with ThreadPoolExecutor(1) as other:
            assert other.submit(rounding_up).result() == (usual, upward)
    finally:
        found.files.close()


def test_fast_rounds_latents_and_nothing_else_of_what_is_stored_unquantised(tmp_path: Path) -> None:
    """Contract, f: without latents and quantised experts, `fast` and `exact` are the same bits."""
    write_tiny_model(tmp_path, replace(TINY_LINEAR, attention_layers=(), experts=0))
    logits = []
    for precision in Precision:
        found = find_model(tmp_path)
        try:
            loaded = load_model(found, precision, max_rows=64)
            state = Stepper(loaded, StatePool(loaded.layout)).run(np.array(PROMPT, np.int32))
            assert state.logits is not None
            logits.append(state.logits.array.tobytes())
        finally:
            found.files.close()
    assert logits[0] == logits[1]


@pytest.mark.parametrize("precision", Precision)
async def test_any_split_of_a_prompt_and_any_neighbour_gives_the_same_bits(model: Path, precision: Precision) -> None:
    async with open_runtime(model, budget="1GiB", precision=precision) as rt:

        async def read(namespace: str, cuts: list[int]) -> Session:
            session = await rt.session(namespace=namespace)
            for start, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
                await session.append(PROMPT[start:end])
            return session

        whole = await (await read("whole", [])).logits()
        splits = [[1], [199], [64], [16, 32, 40], list(range(1, 200)), list(range(7, 200, 7))]
        together: dict[int, Session] = {}

        async def one(index: int, cuts: list[int]) -> None:
            together[index] = await read(f"split {index}", cuts)

        async with anyio.create_task_group() as tasks:
            for index, cuts in enumerate(splits):
                tasks.start_soon(one, index, cuts)
        for session in together.values():
            np.testing.assert_array_equal(await session.logits(), whole)


async def test_nothing_is_compiled_after_the_runtime_is_ready(model: Path, tmp_path: Path) -> None:
    """B101: greedy, sampled, several choices, fork, guesses and resume all use what was compiled before."""
    async with open_runtime(model, budget="1GiB", store=tmp_path) as rt:
        before = kernels.compilations()
        session = await rt.session()
        await session.append(PROMPT)
        await session.generate(SamplingParams(temperature=0, max_tokens=5)).collect()
        for child in await session.fork_many(3):
            await child.generate(cut_at(5)).collect()
        await session.append(PROMPT[:50] * 3)
        await session.generate(SamplingParams(temperature=0, max_tokens=20)).collect()
        point = await session.pause()
        await (await rt.resume(point)).generate(cut_at(3)).collect()
        assert kernels.compilations() == before


async def test_the_state_is_float32_and_does_not_drift(tmp_path: Path) -> None:
    """B05: bfloat16 weights, 1,000 steps of one token; the state stays as close to float64 as it was at first."""
    folder = tmp_path / "model"
    # Without experts: a route that flips at a near tie would hide the drift that is looked for.
    write_tiny_model(folder, replace(TINY_LINEAR, layers=4, attention_layers=(4,), experts=0), seed=2)
    loaded = load_model(find_model(folder), Precision.EXACT, max_rows=8)
    definition = Model(*load(folder), 1e-6)
    pool = StatePool(loaded.layout)
    stepper = Stepper(loaded, pool)
    tokens = np.random.default_rng(3).integers(0, 1000, 1_000).astype(np.int32)
    state, errors = pool.empty(), []
    for start in range(0, 1_000, 100):
        state = stepper.run(tokens[start : start + 100], [1] * 100, after=state)
        definition.feed(tokens[start : start + 100])
        assert state.fixed is not None
        shape = loaded.model.config.kda
        ours = to_matrices(kda_view(loaded.layout, state.fixed), shape.heads, shape.head_dim)
        assert ours.dtype == np.float32
        wanted = np.stack([definition.kda[layer].matrix for layer in sorted(definition.kda)])
        errors.append(float(np.linalg.norm(ours - wanted) / np.linalg.norm(wanted)))
    assert max(errors) < 1e-5
    assert max(errors[5:]) < 3 * max(errors[:2])

    snapshot = snapshot_of(loaded.layout, state)
    assert snapshot.kda.dtype == np.float32
    assert snapshot.layout.latent_type is LatentType.FLOAT32
    other = StatePool(loaded.layout, poison=True)
    draft = other.draft(other.empty(), state.position, with_logits=True)
    fill(draft, loaded.layout, snapshot)
    assert state.fixed is not None
    np.testing.assert_array_equal(draft.fixed.array, state.fixed.array)
