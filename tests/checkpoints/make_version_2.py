"""Wrote data/version-2, a store of format version 2 with latents of 8 bits; those files are never changed again."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from serai.checkpoints import LatentPage, LatentType, Packing, Snapshot, Storage, Store
from serai.checkpoints.files.codec import Codec
from tests.checkpoints import make_version_1
from tests.checkpoints.make_version_1 import node, ramp

FOLDER = Path(__file__).parent / "data" / "version-2"
LAYOUT = replace(make_version_1.LAYOUT, latent_type=LatentType.Q8)
FINGERPRINT = replace(make_version_1.FINGERPRINT, latents="q8", state_layout=LAYOUT.describe())


def page(rows: int) -> LatentPage:
    """Codes that count up, and the scales 1/8 and 1/16."""
    codes = np.arange(2 * rows * 6, dtype=np.uint8).reshape(2, rows, 6)
    scales = np.tile(np.array([1 / 8, 1 / 16], np.float32).view(np.uint8), (2, rows, 1))
    return LatentPage(np.concatenate([codes, scales], axis=2))


def state(position: int) -> Snapshot:
    """The state stored at `position`."""
    return Snapshot(
        position=position,
        layout=LAYOUT,
        kda=ramp(LAYOUT.kda_shape, 1),
        conv=ramp(LAYOUT.conv_shape, position),
        pages=tuple(page(rows) for rows in LAYOUT.page_rows(position)),
        logits=ramp((LAYOUT.vocab,), position),
    )


STEPS: tuple[tuple[int, Packing, Storage], ...] = ((5, Packing.NONE, Storage()), (2, Packing.SMALL, Storage()))
CODECS = set(Codec) - {Codec.ZSTD_PLANES_2}


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    with Store.open(str(FOLDER), now=lambda: 1.75e9) as store:
        parent = None
        for number, (tokens, packing, storage) in enumerate(STEPS, start=1):
            parent = node(number, tokens, parent)
            store.record(parent)
            store.save(parent.id, state(parent.position), FINGERPRINT, reason="turn", packing=packing, storage=storage)
        store.tag("release", parent.id if parent is not None else "")
    for name in ("index.sqlite", "lock"):
        (FOLDER / name).unlink()


if __name__ == "__main__":
    main()
