"""Dealing the outputs of a product to tasks, and writing finished sums."""

from typing import Any

from serai.kernels.compile import inline
from serai.kernels.memory import f32_at, f32_at_n, store_at, store_at_n
from serai.kernels.threads import team

# In bytes of weights read by one row, about 0.05 ns each a thread; two more rows cost as much again. A task should take
# some microseconds, and a launch (1 to 2 us) should save several.
_TASK_WORK = 1 << 16
_SPREAD_WORK = 1 << 18
# Large matrices are cut into about so many tasks and seldom more: where a run of weights ends, what was prefetched
# beyond it lies in the wrong core's cache. One row (of each expert, on average) does nothing but read, and every task
# interrupts that for a moment: so many a thread are enough for it.
_MOST_TASKS, _ONE_ROW_TASKS_A_THREAD = 128, 24
# With many rows, a task takes some units past one group of rows after the other, so that both stay in its second-level
# cache; but it leaves enough tasks for threads to end together. Of 512 rows, four units a task are up to 2 % slower.
_MANY_ROWS, _MANY_ROWS_UNITS, _LEAST_TASKS = 64, 2, 32


@inline
def deal(units: int, unit_bytes: int, rows: int) -> Any:
    """How to cut ``units`` of ``unit_bytes`` weights: (units a task, tasks, whether a launch is worth it)."""
    work = unit_bytes * (1 + rows // 2)
    most = min(_MOST_TASKS, _ONE_ROW_TASKS_A_THREAD * team()) if rows == 1 else _MOST_TASKS
    chunk = max(1, _TASK_WORK // work, units // most)
    if rows > _MANY_ROWS:
        chunk = max(chunk, min(_MANY_ROWS_UNITS, units // _LEAST_TASKS))
    return chunk, (units + chunk - 1) // chunk, units * work > _SPREAD_WORK


@inline
def existing(block: int, blocks: int) -> int:
    """The block to read for a block number that may not exist; :func:`put` drops the sums of those."""
    return block if block < blocks else 0


@inline
def put(at: int, value: Any, left: int, add: bool) -> None:
    """Write (or add) the first ``left`` of sixteen outputs at an address; all from 16 on, none below 1."""
    if left >= 16:
        store_at(at, f32_at(at) + value if add else value)
    elif left > 0:
        store_at_n(at, f32_at_n(at, left) + value if add else value, left)
