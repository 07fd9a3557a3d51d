"""Every figure of memory-math's comparison with other attention families."""

import pytest

from serai.runtime.memory.attention import PUBLISHED, alternatives
from serai.runtime.models.config import load_config
from tests.runtime.models.small_checkpoints import DATA

GB = 10**9
K3 = load_config(DATA / "kimi-k3-config.json")


def test_published_models_cost_what_their_shapes_say() -> None:
    llama, qwen, multi_head, deepseek = PUBLISHED
    assert llama.token_bytes == 524_288
    assert llama.session_bytes(4096) == 2 * 2**30
    assert llama.session_bytes(262_144) == 128 * 2**30
    assert qwen.token_bytes == 98_304
    assert multi_head.token_bytes == 8 * 98_304
    assert deepseek.token_bytes == 70_272


@pytest.mark.parametrize(
    ("tokens", "expanded_gib", "latents_gib"),
    [(4096, 11.25, 0.2109375), (32_768, 90, 1.6875), (131_072, 360, 6.75), (1_048_576, 2880, 54)],
)
def test_k3s_expanded_keys_and_values_against_its_latents(tokens: int, expanded_gib: float, latents_gib: float) -> None:
    hybrid, _, expanded, _ = alternatives(K3, 4)
    assert expanded.token_bytes == 2_949_120
    assert hybrid.token_bytes == 55_296
    assert expanded.session_bytes(tokens) / 2**30 == expanded_gib
    assert tokens * hybrid.token_bytes / 2**30 == latents_gib
    assert 53 < expanded.token_bytes / hybrid.token_bytes < 54


@pytest.mark.parametrize(
    ("tokens", "all_latent_gb", "hybrid_gb", "less_percent"),
    [(128_000, 13.71, 3.76, 72.6), (1_000_000, 107.14, 27.87, 74.0)],
)
def test_k3_against_latent_attention_everywhere(
    tokens: int, all_latent_gb: float, hybrid_gb: float, less_percent: float
) -> None:
    hybrid, everywhere, _, _ = alternatives(K3, 2)
    assert hybrid.fixed_bytes == 217_055_232
    assert everywhere.session_bytes(tokens) / GB == pytest.approx(all_latent_gb, abs=0.005)
    assert hybrid.session_bytes(tokens) / GB == pytest.approx(hybrid_gb, abs=0.0051)
    less = 100 * (1 - hybrid.session_bytes(tokens) / everywhere.session_bytes(tokens))
    assert less == pytest.approx(less_percent, abs=0.05)


def test_a_trail_of_restart_snapshots_is_still_far_less() -> None:
    hybrid, everywhere, _, _ = alternatives(K3, 2)
    trail = (1_000_000 // 20_000) * hybrid.fixed_bytes
    assert trail / GB == pytest.approx(10.85, abs=0.005)
    total = trail + hybrid.session_bytes(1_000_000)
    assert total / GB == pytest.approx(38.72, abs=0.005)
    assert 100 * (1 - total / everywhere.session_bytes(1_000_000)) == pytest.approx(64, abs=0.5)


def test_k3_with_full_attention_in_every_layer() -> None:
    """69 KDA layers of 96 heads of 128 keep keys and values beside the expanded latents of 24 layers."""
    _, _, expanded, full = alternatives(K3, 2)
    assert full.token_bytes - expanded.token_bytes == 69 * 2 * 96 * 128 * 2
    assert full.fixed_bytes == 0
