"""Fixtures for the whole suite."""

import pytest
from hypothesis import settings

# No test is timed: how long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def anyio_backend() -> str:
    """The runtime is made for asyncio."""
    return "asyncio"
