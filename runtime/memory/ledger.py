"""What holds which buffers. The invariant behind the budget: every live buffer is held by somebody who can be named,
and counted exactly."""

from collections import Counter
from collections.abc import Iterable

from serai.runtime.state import Buffer, Part, State, StatePool, part_bytes


def held_bytes(pool: StatePool, *states: State | None) -> int:
    """Bytes of all buffers that these states hold, a shared one counted once."""
    buffers = {buffer for state in states if state is not None for buffer in state.buffers()}
    return sum(part_bytes(pool.layout, buffer.part) for buffer in buffers)


def check_holders(pool: StatePool, held: Iterable[State]) -> None:
    """Hold the pool's counts against all references to states that there are, one item a reference.

    Raises `AssertionError`, saying which count is off and by how much. Takes the time it takes to walk every page.
    """
    references = Counter(held)
    tables = Counter(state.table for state in references)
    buffers: Counter[Buffer] = Counter(page for table in tables for page in table.pages)
    for state, count in references.items():
        if state.refs != count:
            raise AssertionError(f"{state} counts {state.refs} holders, and {count} can be named")
        buffers.update(one for one in (state.fixed, state.logits) if one is not None)
    for table, count in tables.items():
        if table.refs != count:
            raise AssertionError(f"a table of {len(table.pages)} pages counts {table.refs} states, and {count} hold it")
    for buffer, count in buffers.items():
        if buffer.refs != count:
            raise AssertionError(f"a {buffer.part.value} buffer counts {buffer.refs} holders, and {count} can be named")
    for part in Part:
        named = sum(buffer.part is part for buffer in buffers)
        if pool.live(part) != named:
            raise AssertionError(f"{pool.live(part)} {part.value} buffers are out, and holders of {named} can be named")
    counted = sum(part_bytes(pool.layout, buffer.part) for buffer in buffers)
    if pool.live_bytes != counted:
        raise AssertionError(f"{pool.live_bytes} bytes of state are counted, and {counted} are held")
