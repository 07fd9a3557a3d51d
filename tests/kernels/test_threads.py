"""The thread pool: every task once, any number of callers, forks, and thread counts."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.atomic import atomic_add, atomic_load
from serai.kernels.compile import inline, kernel
from serai.kernels.memory import addr
from serai.kernels.runs import deal, take, take_some
from serai.kernels.threads import parallel_for

ROOT = Path(__file__).resolve().parents[2]


@inline
def _count(task: int, counts: Any, turns: int) -> None:
    for _ in range(turns):
        counts[task] += 1


@kernel("void(i64[::1], i64, b1)", before=threads.start)
def count_tasks(counts: NDArray[np.int64], turns: int, spread: bool) -> None:
    parallel_for(counts.size, spread, _count, (counts, turns))


@inline
def _empty_runs(worker: int, runs: int, workers: int, most: int, counts: int) -> None:
    """Count one's own tasks, `most` at a time, then the others', one by one from their far end."""
    # All begin together, as far as threads of their own have them: who is alone takes all.
    arrived = runs + 64 * workers
    atomic_add(arrived, 1)
    waited = 0
    while atomic_load(arrived) < workers and waited < 100_000:
        waited += 1
    first, past = take_some(runs + 64 * worker, most)
    while first < past:
        for task in range(first, past):
            atomic_add(counts + 8 * task, 1)
        first, past = take_some(runs + 64 * worker, most)
    for turn in range(1, workers):
        task = take(runs + 64 * ((worker + turn) % workers), False)
        while task >= 0:
            atomic_add(counts + 8 * task, 1)
            task = take(runs + 64 * ((worker + turn) % workers), False)


@kernel("void(i64[::1], i64[::1], i64, i64)", before=threads.start)
def deal_and_take(counts: NDArray[np.int64], runs: NDArray[np.int64], workers: int, most: int) -> None:
    """`runs` has eight words a worker, and as many for how many have come."""
    tasks = counts.size
    for worker in range(workers):
        at = addr(runs, 8 * worker)
        deal(at, worker * tasks // workers, (worker + 1) * tasks // workers)
    parallel_for(workers, True, _empty_runs, (addr(runs, 0), workers, most, addr(counts, 0)))


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = threads.threads()
    yield
    threads.set_threads(before)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.usefixtures("restored_threads")
def test_every_task_runs_exactly_once_with_any_number_of_threads(n: int) -> None:
    threads.set_threads(n)
    for tasks in [0, 1, 2, 3, 64, 1000]:
        counts = np.zeros(tasks, np.int64)
        for _ in range(50):
            count_tasks(counts, 1, True)
        assert (counts == 50).all()
    assert threads.threads() == n


def test_threads_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        threads.set_threads(0)


@pytest.mark.usefixtures("restored_threads")
def test_python_threads_may_launch_at_once() -> None:
    """B106: numba's default layer aborts here."""
    threads.set_threads(3)
    arrays = [np.zeros(64, np.int64) for _ in range(4)]
    callers = [threading.Thread(target=lambda a=a: [count_tasks(a, 7, True) for _ in range(300)]) for a in arrays]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((a == 2100).all() for a in arrays)


def test_a_parallel_region_makes_a_second_thread_wait() -> None:
    """B106: steps of two sessions follow each other."""
    order: list[str] = []
    entered, release = threading.Event(), threading.Event()

    def first() -> None:
        with threads.parallel_region(), threads.parallel_region():
            entered.set()
            release.wait()
            order.append("first")

    def second() -> None:
        entered.wait()
        with threads.parallel_region():
            order.append("second")

    workers = [threading.Thread(target=first), threading.Thread(target=second)]
    for worker in workers:
        worker.start()
    entered.wait()
    release.set()
    for worker in workers:
        worker.join()
    assert order == ["first", "second"]


def test_the_layer_is_logged_when_the_pool_starts(caplog: pytest.LogCaptureFixture) -> None:
    """B106: the chosen layer is known from the log."""
    before = threads.threads()
    with caplog.at_level("INFO", logger="serai.kernels.threads"):
        threads.set_threads(before + 1)
        threads.start()
        threads.set_threads(before)
    assert f"on {before + 1} threads (serai pool" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_computes_and_exits() -> None:
    code = (
        "import os, sys, numpy as np\n"
        "from tests.kernels.test_threads import count_tasks\n"
        "counts = np.zeros(100, np.int64)\n"
        "count_tasks(counts, 1, True)\n"
        "pid = os.fork()\n"
        "count_tasks(counts, 1, True)\n"
        "assert (counts == 2).all()\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="threads have ranks of their own on Linux only")
@pytest.mark.usefixtures("restored_threads")
def test_workers_rank_behind_threads_that_react() -> None:
    threads.set_threads(2)
    threads.start()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("serai-kernel")]
    ranks = [os.getpriority(os.PRIO_PROCESS, worker.native_id) for worker in workers if worker.native_id]
    assert ranks == [min(own + 5, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_every_task_of_a_run_is_taken_once(workers: int, most: int, restored_threads: None) -> None:
    """By its owner, some at a time, or by another worker from the far end."""
    threads.set_threads(2)
    for tasks, times in ((1, 50), (2, 50), (7, 50), (1000, 50), (100_000, 10)):
        for _ in range(times):
            counts = np.zeros(tasks, np.int64)
            deal_and_take(counts, np.zeros(8 * workers + 8, np.int64), workers, most)
            assert (counts == 1).all()
