"""What can go wrong when experts are read while a model runs, or when a model is packed."""

from pathlib import Path

from serai.checkpoints.errors import SeraiError


class ExpertUnreadable(SeraiError):
    """An expert that a step needed could not be read; it ends the sessions that needed it and no other.

    Attributes: `layer`, `expert` (both from 0), `path`.
    """

    def __init__(self, *, layer: int, expert: int, path: Path, why: str) -> None:
        self.layer = layer
        self.expert = expert
        self.path = path
        super().__init__(
            f"expert {expert} of layer {layer} can't be read: {path} {why}; restore the file, then resume the session"
        )


class FileEnded(SeraiError):
    """A file is shorter than it was when it was opened.

    Attributes: `path`, `size_bytes`, `needed_bytes`.
    """

    def __init__(self, *, path: Path, size_bytes: int, needed_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.needed_bytes = needed_bytes
        super().__init__(f"{path} ended at {size_bytes:,} of {needed_bytes:,} bytes; it was cut since it was opened")


class PackFailed(SeraiError):
    """A model can't be packed there, or a packed model isn't what was written; the sentence names the file."""
