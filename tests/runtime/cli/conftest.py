"""Models for the commands to run on."""

from pathlib import Path

import pytest

import serai.runtime.models.kimi  # noqa: F401  # declares every kernel
from serai.kernels import compile as kernels
from serai.runtime.bench.tiny import TINY_K3, write_tiny_model


@pytest.fixture(scope="session")
def tiny_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random K3 with a tokenizer, and its kernels compiled, so that processes started later find them."""
    kernels.warm()
    folder = tmp_path_factory.mktemp("models") / "tiny-k3"
    write_tiny_model(folder, TINY_K3)
    return folder
