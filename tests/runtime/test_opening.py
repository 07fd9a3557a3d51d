"""What an opening that was broken off leaves behind: nothing."""

import asyncio
import threading
from pathlib import Path

import anyio
import pytest

from serai.checkpoints.store import Store
from serai.runtime import open_runtime
from serai.runtime.opening import chosen_budget

pytestmark = pytest.mark.anyio


async def test_a_store_that_opens_after_its_caller_was_cancelled_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio's own cancellation does not stop the thread that opens, and nobody else would close what it brings."""
    opening, go_on, opened = threading.Event(), threading.Event(), threading.Event()
    really_open = Store.open

    def slowly(folder: str) -> Store:
        opening.set()
        assert go_on.wait(timeout=10)
        store = really_open(folder)
        opened.set()
        return store

    async def use() -> None:
        async with open_runtime("nano", budget="1GiB", store=tmp_path / "store"):
            raise AssertionError("it was cancelled before it was open")

    monkeypatch.setattr(Store, "open", staticmethod(slowly))
    task = asyncio.ensure_future(use())
    await anyio.to_thread.run_sync(opening.wait)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await anyio.to_thread.run_sync(opened.wait)
    really_open(str(tmp_path / "store")).close()  # raises StoreBusy as long as the first one is open


async def test_a_budget_beyond_what_is_free_is_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """B115."""
    assert chosen_budget("1MiB") == 1 << 20
    assert caplog.records == []
    assert chosen_budget("900TB") == 900 * 10**12
    assert "a budget of 900,000,000,000,000 bytes is more than the" in caplog.text
    assert "the kernel may stop the process" in caplog.text
