"""Small states and nodes of random numbers, for the harnesses that break stores on purpose."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.snapshot import Fingerprint, LatentPage, LatentType, PageIdentity, Snapshot, StateLayout

LAYOUT: Final = StateLayout(
    kda_shape=(3, 2, 8, 8),
    conv_shape=(3, 3, 3, 16),
    mla_layers=2,
    latent_width=10,
    latent_type=LatentType.FLOAT32,
    page_tokens=4,
    vocab=50,
)
FINGERPRINT: Final = Fingerprint(
    config="config-a",
    tokenizer="tokenizer-a",
    chat_format="kimi-k3",
    precision="exact",
    trunk="same",
    latents="float32",
    experts_per_token=8,
    state_layout=LAYOUT.describe(),
    weights="weights-a",
    build="0.1.0",
    simd="avx2",
)


def sample_state(position: int, seed: int = 0, layout: StateLayout = LAYOUT, *, smooth: bool = False) -> Snapshot:
    """A state of random numbers, or of few different ones (`smooth`) that pack well; its full pages have identities."""
    random = np.random.default_rng(seed)

    def floats(*shape: int) -> NDArray[np.float32]:
        values = random.standard_normal(shape, dtype=np.float32)
        return np.round(values) if smooth else values

    pages = []
    for rows in layout.page_rows(position):
        latents: NDArray[Any] = floats(layout.mla_layers, rows, layout.row_items)
        if layout.latent_type is LatentType.Q8:
            latents = np.round(latents).astype(np.int8).view(np.uint8)
        if layout.latent_type is LatentType.BFLOAT16:
            latents = (latents.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        pages.append(LatentPage(latents, PageIdentity() if rows == layout.page_tokens else None))
    return Snapshot(
        position=position,
        layout=layout,
        kda=floats(*layout.kda_shape),
        conv=floats(*layout.conv_shape),
        pages=tuple(pages),
        logits=None if position == 0 else floats(layout.vocab),
    )


def sample_node(
    count: int, parent: NodeRecord | None = None, *, session_id: str | None = None, kind: NodeKind = NodeKind.APPEND
) -> NodeRecord:
    """A node that adds `count` tokens, in the parent's session unless told otherwise."""
    start = 0 if parent is None else parent.position
    return NodeRecord(
        session_id=session_id or (new_id() if parent is None else parent.session_id),
        kind=kind,
        position=start + count,
        tokens=np.arange(start, start + count, dtype=np.int32),
        parent_id=None if parent is None else parent.id,
        turn=0 if parent is None else parent.turn + 1,
        metadata={"note": "größer"},
        sampler={"temperature": 0.8, "seed": 7, "branch": 0},
    )


def same_bits(one: Snapshot, other: Snapshot) -> bool:
    """Whether two states are equal bit for bit, shapes and types included."""
    if one.layout != other.layout or one.position != other.position:
        return False
    arrays = [(one.kda, other.kda), (one.conv, other.conv)]
    arrays += [(a.rows, b.rows) for a, b in zip(one.pages, other.pages, strict=True)]
    if one.logits is not None and other.logits is not None:
        arrays.append((one.logits, other.logits))
    return all(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in arrays)
