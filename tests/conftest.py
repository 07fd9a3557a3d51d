"""Fixtures for the whole suite."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The runtime is made for asyncio."""
    return "asyncio"
