"""Models for the commands to run on."""

from pathlib import Path

import pytest

import serai.runtime.models.kimi  # noqa: F401  # declares every kernel
from serai.kernels import compile as kernels
from serai.runtime.models.locate import BUILT_IN


@pytest.fixture(scope="session")
def nano() -> Path:
    """The folder of the model in the package, its kernels compiled, so that processes started later find them."""
    kernels.warm()
    return BUILT_IN["nano"]
