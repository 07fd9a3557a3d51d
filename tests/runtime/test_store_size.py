"""The store's size in the status: counted when somebody looks, and never on the event loop."""

import threading
from pathlib import Path

import anyio
import pytest

from serai.checkpoints.errors import StoreFailed
from serai.runtime.sessions.store_size import StoreSize
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio


async def test_the_status_tells_what_the_store_takes(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "store") as runtime:
        session = await runtime.session()
        await session.append([1, 2, 3])
        while (size := runtime.status().store_bytes) is None:  # noqa: ASYNC110  # the count tells nobody
            await anyio.sleep(0.01)
        assert size == runtime._services.journal.file_bytes() > 0


async def test_without_a_store_there_is_no_size() -> None:
    async with fake_runtime() as runtime:
        assert runtime.status().store_bytes is None


async def test_nothing_is_counted_while_nobody_looks_and_a_failure_is_survived() -> None:
    counted: list[str] = []

    def count() -> int:
        counted.append(threading.current_thread().name)
        if len(counted) == 1:
            raise StoreFailed(path="x", doing="counting", reason="gone")
        return 7

    size = StoreSize(count, period_s=0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(size.run)
        await anyio.wait_all_tasks_blocked()
        assert counted == []
        while size.last() is None:  # noqa: ASYNC110
            await anyio.sleep(0.001)
        assert size.last() == 7
        assert threading.main_thread().name not in counted
        tasks.cancel_scope.cancel()
