"""Kimi K3's own shape, whole, and cut down to what a disk and a patience hold."""

from collections.abc import Iterator
from dataclasses import replace

from serai.runtime.bench.mid import MID_K3, with_layers
from serai.runtime.bench.tiny import TinyModel

K3 = replace(
    MID_K3,
    hidden=7168,
    layers=93,
    attention_layers=(*range(4, 93, 4), 93),
    kda_heads=96,
    heads=96,
    q_lora=1536,
    dense_inner=33_792,
    experts=896,
    experts_per_token=16,
    expert_inner=3072,
    expert_latent=3584,
    residual_block=12,
)
"""As published: 1.56 TB, of which no file is ever made."""

SLICE_VOCAB = 32_768
"""A fifth of K3's words: embedding and head of all of them take 4.7 GB and have no part in streaming."""


def k3_slices() -> Iterator[TinyModel]:
    """Two layers at full width, KDA with the dense MLP and MLA with the experts: 20 GB with all 896 experts of
    17.5 MB, then with half as many, and so on."""
    two = replace(with_layers(K3, 2, SLICE_VOCAB), attention_layers=(2,))
    experts = K3.experts
    while experts >= 2 * K3.experts_per_token:
        yield replace(two, experts=experts)
        experts //= 2
