"""States of Kimi K3's shape, as large as this machine has room for."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentPage, LatentType, PageIdentity, Snapshot, StateLayout, new_snapshot
from serai.kernels.kda_panels import PANEL, panels_of, to_panels
from serai.runtime.memory.limits import default_budget

K3 = StateLayout(
    kda_shape=(69, 96 * panels_of(128), 128, PANEL),
    conv_shape=(69, 3, 3, 12_288),
    mla_layers=24,
    latent_width=576,
    latent_type=LatentType.FLOAT32,
    page_tokens=64,
    vocab=163_840,
)
K3_TOKENS = 32_768
QUICK_SCALE = 24
"""Divides both the KDA layers and the tokens; pages and layers keep K3's size, as parts of a store do."""

STATES_IN_MEMORY = 3
STATES_ON_DISK = 4
UNALIGNED_TOKENS = 10
"""Positions end this many tokens before a page does: the worst place to grow from is somewhere within a page."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured: K3's layout with `layers` KDA layers, at `position` tokens; `scale` is 1 for the whole K3."""

    scale: int
    layout: StateLayout
    position: int

    def __str__(self) -> str:
        size = "K3's shape" if self.scale == 1 else f"K3's shape, a {self.scale}th of its KDA layers and tokens"
        return f"{size}: {self.layout.kda_shape[0]} KDA layers, {self.position:,} tokens, {self.bytes / 1e9:.2f} GB"

    @property
    def bytes(self) -> int:
        return self.layout.fixed_bytes + self.position * self.layout.token_bytes


def shape_at(scale: int) -> Shape:
    """K3's shape, divided by `scale`."""
    layers = max(1, K3.kda_shape[0] // scale)
    layout = replace(K3, kda_shape=(layers, *K3.kda_shape[1:]), conv_shape=(layers, *K3.conv_shape[1:]))
    return Shape(scale, layout, K3_TOKENS // scale // K3.page_tokens * K3.page_tokens - UNALIGNED_TOKENS)


def shape_that_fits(folder: Path, *, quick: bool) -> Shape:
    """The largest shape for which memory and the disk of `folder` have room, or the quick one."""
    memory, disk = default_budget().budget_bytes, shutil.disk_usage(folder).free
    scale = QUICK_SCALE if quick else 1
    while scale < QUICK_SCALE and not _fits(shape_at(scale), memory, disk):
        scale *= 2
    return shape_at(min(scale, QUICK_SCALE))


def _fits(shape: Shape, memory_bytes: int, disk_bytes: int) -> bool:
    return shape.bytes * STATES_IN_MEMORY <= memory_bytes and shape.bytes * STATES_ON_DISK <= disk_bytes // 2


def filled(shape: Shape, rng: np.random.Generator) -> Snapshot:
    """A state such as a model leaves it: KDA matrices out of the recurrence, normalised latents.

    One layer is run; the others are the same at other scales, which share no byte pattern with it.
    """
    snapshot = new_snapshot(shape.layout, shape.position)
    head_dim = shape.layout.kda_shape[2]
    ran = to_panels(recurrence(shape.layout.conv_shape[3] // head_dim, head_dim, head_dim, rng))
    for layer in snapshot.kda:
        np.multiply(ran, np.float32(rng.uniform(0.3, 3.0)), out=layer)
    rng.standard_normal(dtype=np.float32, out=snapshot.conv)
    for page in snapshot.pages:
        rng.standard_normal(dtype=np.float32, out=page.rows)
    if snapshot.logits is not None:
        rng.standard_normal(dtype=np.float32, out=snapshot.logits)
    return snapshot


def recurrence(
    heads: int, key_dim: int, value_dim: int, rng: np.random.Generator, tokens: int = 24
) -> NDArray[np.float32]:
    """`[heads, key_dim, value_dim]` after some tokens of random gates, keys and values.

    A token decays each key channel and then corrects what the state says of its key (the gated delta rule):
    S ← e^g S, S ← S + β k (v − kᵀS)ᵀ, with unit keys.
    """
    state = np.zeros((heads, key_dim, value_dim), np.float32)
    for _ in range(tokens):
        key = rng.standard_normal((heads, key_dim), dtype=np.float32)
        key /= np.linalg.norm(key, axis=1, keepdims=True)
        value = rng.standard_normal((heads, value_dim), dtype=np.float32)
        rate = rng.uniform(0, 1, (heads, 1)).astype(np.float32)
        state *= np.exp(-rng.exponential(0.05, (heads, key_dim, 1))).astype(np.float32)
        said = np.einsum("hk,hkv->hv", key, state)
        state += (rate * key)[:, :, None] * (value - said)[:, None, :]
    return state


def grown(before: Snapshot, tokens: int, rng: np.random.Generator) -> Snapshot:
    """The state so many tokens later: other KDA matrices, the full pages shared, the last one filled up."""
    after = new_snapshot(before.layout, before.position + tokens)
    np.multiply(before.kda, np.float32(1.0000371), out=after.kda)
    rng.standard_normal(dtype=np.float32, out=after.conv)
    if after.logits is not None:
        rng.standard_normal(dtype=np.float32, out=after.logits)
    pages = []
    for number, page in enumerate(after.pages):
        known = before.pages[number] if number < len(before.pages) else None
        if known is not None and known.identity is not None:
            pages.append(known)
            continue
        rng.standard_normal(dtype=np.float32, out=page.rows)
        if known is not None:
            page.rows[:, : known.rows.shape[1]] = known.rows
        pages.append(page)
    return replace(after, pages=tuple(pages))


def renewed(snapshot: Snapshot) -> Snapshot:
    """The same state as a store that has never met its pages must see it."""
    pages = tuple(LatentPage(page.rows, PageIdentity() if page.identity else None) for page in snapshot.pages)
    return replace(snapshot, pages=pages)
