"""Wrote data/version-2, a store of format version 2 with latents of 8 bits; those files are never changed again."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from serai.checkpoints import LatentPage, LatentType, Packing, Snapshot, Storage
from serai.checkpoints.files.codec import Codec
from tests.checkpoints import make_version_1
from tests.checkpoints.make_version_1 import ramp, write

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


if __name__ == "__main__":
    write(FOLDER, STEPS, state, FINGERPRINT)
