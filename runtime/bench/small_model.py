"""The small model that benches of sessions run on: nano when it is here, else a tiny one with random weights."""

from pathlib import Path

from serai.runtime.bench.tiny import cached_tiny_model
from serai.runtime.errors import ModelNotFound
from serai.runtime.models.locate import locate_model


def small_model(folder: Path) -> tuple[Path, str]:
    """Its folder and what to call it; `folder` keeps a tiny model when one has to be made."""
    try:
        return locate_model("nano"), "nano"
    except ModelNotFound:
        return cached_tiny_model(folder), "the tiny model (random weights; nano is not here)"
