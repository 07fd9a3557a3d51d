"""Sessions that are expected at a known time are back in memory before it, without being asked for."""

from pathlib import Path

import anyio
import pytest

from serai.runtime.memory.residency import Tier
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio


async def test_when_a_session_is_expected_does_not_depend_on_what_else_is_timed(tmp_path: Path) -> None:
    """What the sessions' own clock says of their age is no time of the loop's."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        point = await session.pause()
        object.__setattr__(rt._services, "now_s", lambda: anyio.current_time() + 1_000_000)
        again = await rt.resume(point, background=True)
        with anyio.fail_after(20):
            while again.tier is Tier.COLD:  # noqa: ASYNC110  # nobody says that it is back
                await anyio.sleep(0.01)
