"""Wrote data/version-1, a store of format version 1; those files are never changed again."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from serai.checkpoints import (
    Fingerprint,
    LatentPage,
    LatentType,
    NodeKind,
    NodeRecord,
    Packing,
    Snapshot,
    StateLayout,
    Storage,
    Store,
    StoredAs,
)
from serai.checkpoints.files.codec import Codec

FOLDER = Path(__file__).parent / "data" / "version-1"
SESSION_ID = "aaaaaaaaaaaaaaaaaaaaaaaaaa"
LAYOUT = StateLayout(
    kda_shape=(1, 2, 4, 4),
    conv_shape=(1, 3, 3, 8),
    mla_layers=2,
    latent_width=6,
    latent_type=LatentType.BFLOAT16,
    page_tokens=4,
    vocab=16,
)
FINGERPRINT = Fingerprint(
    config="c",
    tokenizer="t",
    chat_format="k3",
    precision="fast",
    trunk="same",
    latents="bfloat16",
    experts_per_token=8,
    state_layout=LAYOUT.describe(),
    weights="w",
    build="0.1.0",
    simd="avx2",
)


def ramp(shape: tuple[int, ...], start: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Numbers that need no random generator: start, start + 1/8, ..."""
    return (np.arange(int(np.prod(shape))).reshape(shape) / 8 + start).astype(np.float32)


def state(position: int) -> Snapshot:
    """The state stored at `position`; every number is exact in bfloat16 as well."""
    return Snapshot(
        position=position,
        layout=LAYOUT,
        kda=ramp(LAYOUT.kda_shape, 1),
        conv=ramp(LAYOUT.conv_shape, position),
        pages=tuple(
            LatentPage((np.arange(2 * rows * 6).reshape(2, rows, 6) + 0x3F80).astype(np.uint16))
            for rows in LAYOUT.page_rows(position)
        ),
        logits=ramp((LAYOUT.vocab,), position),
    )


def node(number: int, tokens: int, parent: NodeRecord | None) -> NodeRecord:
    """The node of number 1, 2, ...: its id is 26 times the same letter."""
    start = 0 if parent is None else parent.position
    return NodeRecord(
        id="bcdefgh"[number - 1] * 26,
        session_id=SESSION_ID,
        parent_id=None if parent is None else parent.id,
        kind=NodeKind.APPEND,
        position=start + tokens,
        visible_tokens=start + tokens - 1,
        tokens=np.arange(start, start + tokens, dtype=np.int32) * 1000,
        sampler={"temperature": 0.8, "seed": 7},
        turn=number - 1,
        label="größer",
        namespace="team-a",
        metadata={"n": [1, 2.5, None]},
        created_s=1.75e9 + number,
    )


STEPS: tuple[tuple[int, Packing, Storage], ...] = (
    (5, Packing.NONE, Storage()),
    (2, Packing.SMALL, Storage()),
    (2, Packing.SMALL, Storage(StoredAs.BFLOAT16, StoredAs.INT8_ROWS)),
)
CODECS = set(Codec)
"""How its parts are packed."""


def write(
    folder: Path,
    steps: Sequence[tuple[int, Packing, Storage]],
    state_at: Callable[[int], Snapshot],
    fingerprint: Fingerprint,
) -> None:
    """A store of so many tokens more a step, as it is kept: without what is made from its files."""
    shutil.rmtree(folder, ignore_errors=True)
    with Store.open(str(folder), now=lambda: 1.75e9) as store:
        parent = None
        for number, (tokens, packing, storage) in enumerate(steps, start=1):
            parent = node(number, tokens, parent)
            kept = state_at(parent.position)
            store.record(parent)
            store.save(parent.id, kept, fingerprint, reason="turn", packing=packing, storage=storage)
        store.tag("release", parent.id if parent is not None else "")
    for name in ("index.sqlite", "lock"):
        (folder / name).unlink()


if __name__ == "__main__":
    write(FOLDER, STEPS, state, FINGERPRINT)
