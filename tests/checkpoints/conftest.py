"""Folders for stores: in memory, which spares the disk thousands of fsyncs, and on the disk where it matters."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture
def disk_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder on the disk that holds temporary files."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new folder in memory if the system has a place for it, else on disk."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path_factory.mktemp("folder")
        return
    folder = Path(tempfile.mkdtemp(prefix="serai-test-", dir=_MEMORY))
    yield folder
    shutil.rmtree(folder)
