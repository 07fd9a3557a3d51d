"""Which experts a model was asked for most, kept beside it so that the next start can begin with those: opt-in.

The file is an .npz in the model's folder: `layers` (uint16, the layers that have experts), `usage` (float64
`[layers, experts]`, how often each was wanted, older uses faded as in `policy.fading`). It changes no result, only what
is in the cache when the first token comes; one that does not fit the model is left alone.
"""

import logging
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

USAGE_NAME = "serai-usage.npz"

log = logging.getLogger(__name__)


def save_usage(folder: Path, layers: Sequence[int], usage: NDArray[np.float64]) -> bool:
    """Write what `SlotTable.usage` gives; whether that worked. A folder that can't be written to is a warning."""
    if not usage.any():
        return False  # nothing was asked for, and what an earlier run left is worth more
    unfinished = folder / f".{USAGE_NAME}.{os.getpid()}"
    try:
        with unfinished.open("wb") as file:
            np.savez_compressed(file, layers=np.array(layers, dtype=np.uint16), usage=usage)
        unfinished.replace(folder / USAGE_NAME)
    except OSError as error:
        log.warning("which experts were used can't be kept in %s (%s)", folder, error.strerror)
        unfinished.unlink(missing_ok=True)
        return False
    return True


def load_usage(folder: Path, layers: Sequence[int], experts: int) -> NDArray[np.float64] | None:
    """What was kept, float64 `[layers, experts]`; None when nothing was, or, with a warning, nothing that fits."""
    path = folder / USAGE_NAME
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # NumPy leaves a bad one open
            kept, usage = arrays["layers"], arrays["usage"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning("%s is left alone: it can't be read (%s)", path, error)
        return None
    fits = usage.shape == (len(layers), experts) and usage.dtype == np.float64 and kept.tolist() == list(layers)
    if not fits or not np.isfinite(usage).all() or (usage < 0).any():
        log.warning("%s is left alone: it is of another model, or damaged", path)
        return None
    found: NDArray[np.float64] = usage
    return found
