"""Where the shared facts lie, if this checkout has them beside it; tests that need them skip loudly without."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_FOLDER = ROOT.parent / "shared"
SHARED: Path | None = _FOLDER if _FOLDER.is_dir() else None


def shared(*parts: str) -> Path:
    """The path of a shared file or folder; skips the calling test, saying why, when nothing is shared here."""
    path = _FOLDER.joinpath(*parts)
    if SHARED is None:
        pytest.skip(f"needs {'/'.join(('../shared', *parts))}, which is not beside this checkout")
    assert path.exists(), f"{path} is missing from what is shared"
    return path
