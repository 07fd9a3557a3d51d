"""A quantised trunk: what is quantised and what never is, what it costs in quality, and that states know of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serai.kernels.matrix import Format
from serai.kernels.quantize import Quantized
from serai.runtime import open_runtime
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, ExpertType, TinyModel, write_tiny_model
from serai.runtime.checks.stepping import Stepper
from serai.runtime.errors import BadParameter, ModelMismatch
from serai.runtime.memory.plan import plan_memory
from serai.runtime.models.config import parse_config
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.models.scratch import kernel_scratch_bytes
from serai.runtime.models.scratch_shape import ScratchShape
from serai.runtime.models.trunk import Trunk
from serai.runtime.models.weights import KdaWeights, MlaWeights, MoeWeights
from serai.runtime.opening import LEAST_CONTEXT_TOKENS, expert_room
from serai.runtime.scheduler import Limits
from serai.runtime.state import StatePool

TOKENS = np.random.default_rng(3).integers(0, 1000, 48).astype(np.int32)


def loaded(folder: Path, model: TinyModel, precision: Precision, trunk: Trunk) -> LoadedModel:
    if not folder.exists():
        write_tiny_model(folder, model)
    return load_model(find_model(folder), precision, max_rows=64, trunk=trunk)


def last_logits(model: LoadedModel, cuts: tuple[int, ...] = ()) -> np.ndarray:
    stepper = Stepper(model, StatePool(model.layout, poison=True))
    state = stepper.pool.empty()
    for part in np.split(TOKENS, cuts):
        (state,), _ = stepper.feed([(state, part)])
    assert state.logits is not None
    logits = state.logits.array.copy()
    state.release()
    return logits


@pytest.mark.parametrize(("trunk", "held"), [(Trunk.Q8, Format.Q8), (Trunk.Q4, Format.MXFP4)])
def test_projections_are_quantised_and_router_gates_and_embedding_never_are(
    tmp_path: Path, trunk: Trunk, held: Format
) -> None:
    weights = loaded(tmp_path / "k3", TINY_K3, Precision.FAST, trunk).model.weights
    assert weights.embedding.format is Format.BF16
    assert weights.head.format is Format.Q8
    for layer in weights.layers:
        groups = []
        if isinstance(layer.attention, KdaWeights):
            groups.append(layer.attention.projections)
            assert layer.attention.decay.format is Format.BF16
            assert layer.attention.out.format is held
        if isinstance(layer.attention, MlaWeights):
            groups.append(layer.attention.projections)
            assert layer.attention.key_up.format is layer.attention.value_up.format is Format.BF16
            assert layer.attention.q_b is not None
            assert layer.attention.q_b.format is Format.BF16, "48 columns are no multiple of 32"
        for group in groups:
            (first, start), (gates, after) = group.matrices
            assert (start, first.format, gates.format) == (0, held, Format.BF16)
            kept = {piece for piece, column in group.columns.items() if column >= after}
            assert kept == {"gate", "decay", "beta"} & set(group.columns)
        if isinstance(layer.ffn, MoeWeights):
            assert layer.ffn.router.format is Format.BF16
            assert layer.ffn.projections is not None
            assert [matrix.format for matrix, _ in layer.ffn.projections.matrices] == [held]


@pytest.mark.parametrize(("trunk", "most"), [(Trunk.Q8, 0.1), (Trunk.Q4, 0.9)])
@pytest.mark.parametrize("model", [TINY_K3, TINY_LINEAR], ids=["k3", "linear"])
def test_a_quantised_trunk_is_close_to_the_stored_one_and_bits_do_not_depend_on_the_cut(
    tmp_path: Path, model: TinyModel, trunk: Trunk, most: float
) -> None:
    """Close without experts; with them a rounding can send a token elsewhere, so there only the bits are compared. (By
    1.4 two texts' logits differ; random weights make the most of what MXFP4 changes, a trained model's do not.)"""
    dense = replace(model, experts=0, expert_type=ExpertType.BF16)
    exact = last_logits(loaded(tmp_path / "dense", dense, Precision.EXACT, Trunk.AS_STORED))
    for precision in Precision:
        error = np.linalg.norm(last_logits(loaded(tmp_path / "dense", dense, precision, trunk)) - exact)
        assert 0 < error / np.linalg.norm(exact) < most
        small = loaded(tmp_path / "m", model, precision, trunk)
        whole, cut = last_logits(small), last_logits(small, (1, 2, 19))
        np.testing.assert_array_equal(whole.view(np.uint32), cut.view(np.uint32))


def test_a_tied_head_stays_as_the_embedding_is(tmp_path: Path) -> None:
    tied = replace(TINY_LINEAR, tied_head=True)
    weights = loaded(tmp_path / "tied", tied, Precision.FAST, Trunk.Q8).model.weights
    assert weights.head is weights.embedding
    assert weights.head.format is Format.BF16


@pytest.mark.parametrize("trunk", Trunk)
@pytest.mark.parametrize("precision", Precision)
def test_scratch_is_what_was_planned(tmp_path: Path, precision: Precision, trunk: Trunk) -> None:
    """To the byte: `exact` allocates no 8-bit activations, so none are planned for it."""
    model = loaded(tmp_path / "k3", TINY_K3, precision, trunk).model
    fast = precision is Precision.FAST
    threads = kernel_scratch_bytes(model.config, 64, fast=fast)
    plan = plan_memory(model.config, step_rows=64, kernel_scratch_bytes=threads, trunk=trunk, fast=fast)
    assert model.scratch.bytes == plan.scratch_bytes


def test_opening_plans_no_8_bit_activations_for_exact(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "k3", TINY_K3)
    found = find_model(tmp_path / "k3")
    rows = Limits().step_rows
    threads = kernel_scratch_bytes(found.config, rows, fast=False)
    plan = plan_memory(
        found.config,
        found.files,
        context_tokens=LEAST_CONTEXT_TOKENS,
        step_rows=rows,
        kernel_scratch_bytes=threads,
        trunk=Trunk.Q8,
        fast=False,
    )
    assert expert_room(found, Precision.EXACT, plan.floor_bytes.float32, Trunk.Q8).slots is None
    found.files.close()


def test_activations_are_as_wide_as_the_widest_projection_in_8_bits() -> None:
    shape = ScratchShape.of(parse_config(TINY_K3.config()))
    assert shape.q8_activation_bytes(64) == Quantized.empty(64, shape.inputs).nbytes
    wide = ScratchShape.of(parse_config(replace(TINY_K3, hidden=1000).config()))
    assert wide.inputs == 992, "a matrix of 1,000 columns is not quantised"


@pytest.mark.anyio
async def test_a_state_of_one_trunk_is_not_taken_for_the_others(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", TINY_K3)
    async with open_runtime(tmp_path / "m", budget="1GiB", store=tmp_path / "store", trunk="q8") as rt:
        session = await rt.session()
        await session.append(TOKENS.tolist())
        point = await session.pause()
        again = await rt.resume(point)
        assert again.position == len(TOKENS)
    async with open_runtime(tmp_path / "m", budget="1GiB", store=tmp_path / "store") as rt:
        with pytest.raises(ModelMismatch, match="trunk"):
            await rt.resume(point)


def test_a_trunk_there_is_not_is_one_sentence() -> None:
    with pytest.raises(BadParameter, match="trunk is 'q8', 'q4', or left out to keep it as stored, not 'q9'"):
        Trunk.parse("q9")
