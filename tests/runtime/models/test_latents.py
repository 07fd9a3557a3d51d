"""Latents in the form asked for: what is kept, what it is called, and that no form is taken for another."""

from pathlib import Path

import numpy as np
import pytest

from serai.checkpoints.snapshot import LatentType
from serai.kernels.naive import bf16_round, bf16_widen, q8_latents, q8_widen
from serai.runtime import open_runtime
from serai.runtime.bench.tiny import TINY_K3, write_tiny_model
from serai.runtime.checks.evaluation import evaluate
from serai.runtime.errors import BadParameter, ModelMismatch
from serai.runtime.models.layout import latent_type
from serai.runtime.models.open_model import Precision, find_model, load_model

TOKENS = np.random.default_rng(8).integers(0, 1000, 40).astype(np.int32)


@pytest.mark.parametrize("precision", Precision)
def test_each_form_keeps_the_same_latents_rounded_its_own_way(precision: Precision, tmp_path: Path) -> None:
    """Those of the first MLA layer: what comes after has read them."""
    write_tiny_model(tmp_path / "m", TINY_K3)
    held = {}
    for latents in LatentType:
        loaded = load_model(find_model(tmp_path / "m"), precision, max_rows=64, latents=latents)
        arrays = evaluate(loaded, TOKENS, 30, greedy=0)
        rank = loaded.model.config.mla.kv_lora_rank
        held[latents] = arrays[min(name for name in arrays if name.endswith("_latents"))]
        assert (loaded.fingerprint.latents, loaded.layout.latent_type) == (latents.value, latents)
        assert latents.value in loaded.fingerprint.state_layout
        loaded.model.close()
    exact = np.asarray(held[LatentType.FLOAT32], np.float32)
    np.testing.assert_array_equal(held[LatentType.BFLOAT16], bf16_widen(bf16_round(exact)))
    np.testing.assert_array_equal(held[LatentType.Q8], q8_widen(*q8_latents(exact, rank), rank))


def test_a_token_takes_a_byte_a_number_and_two_scales(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", TINY_K3)
    loaded = load_model(find_model(tmp_path / "m"), Precision.FAST, max_rows=8, latents=LatentType.Q8)
    layout = loaded.layout
    assert layout.token_bytes == layout.mla_layers * (layout.latent_width + 8)
    loaded.model.close()


@pytest.mark.anyio
async def test_a_state_of_one_form_of_latents_is_not_taken_for_another(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", TINY_K3)
    async with open_runtime(tmp_path / "m", budget="1GiB", store=tmp_path / "store", latents="q8") as rt:
        session = await rt.session()
        await session.append(TOKENS.tolist())
        point = await session.pause()
        again = await rt.resume(point)
        assert again.position == len(TOKENS)
    for latents in (None, "float32"):
        async with open_runtime(tmp_path / "m", budget="1GiB", store=tmp_path / "store", latents=latents) as rt:
            with pytest.raises(ModelMismatch, match="latents"):
                await rt.resume(point)


def test_the_precision_has_a_form_of_its_own_and_others_are_asked_for_by_name() -> None:
    assert latent_type(None, fast=True) is LatentType.BFLOAT16
    assert latent_type(None, fast=False) is LatentType.FLOAT32
    assert latent_type("q8", fast=False) is LatentType.Q8
    told = "latents is one of 'float32', 'bfloat16', 'q8', or left out for the precision's own, not 'q4'"
    with pytest.raises(BadParameter, match=told):
        latent_type("q4", fast=True)
