"""Parts between their being written and a snapshot that has them: who counts on one, and what its file is by now."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from serai.checkpoints.files.folders import Folder, FreshFile
from serai.checkpoints.index import Index
from serai.checkpoints.rows import PartRow


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A part of a saved snapshot, with the part it is a delta to.

    `is_new` when this save wrote it, `is_durable` when a committed snapshot had it. `namespace` is that of the save
    that wrote it; None for what came from elsewhere.
    """

    row: PartRow
    base: PartRow | None
    is_new: bool
    is_durable: bool
    namespace: str | None = None


class Pins:
    """Parts that a running save or load counts on, and all files that a running copy does: they are not unlinked
    meanwhile. Guarded by the index's lock."""

    def __init__(self, index: Index, temporary: Folder) -> None:
        self._index = index
        self._temporary = temporary
        self._counts: Counter[str] = Counter()
        self.written: dict[str, SavedPart] = {}
        """Pinned parts whose files are complete, though no snapshot with them is committed yet."""
        self.fresh: dict[str, tuple[PartRow, FreshFile]] = {}
        """Those among them that wait for an fsync and their name: whoever counts on one sees to both."""
        self.placed: dict[str, PartRow] = {}
        """What the file is that a pinned part got last: of two saves that write one, the later one's, whichever commits
        first."""

    def count(self, name: str) -> int:
        """How many running saves, loads and copies count on the part, the manifest or the node."""
        return self._counts[name]

    @contextmanager
    def held(self) -> Iterator[Callable[[str], None]]:
        """A function that pins a part until the block is left, or a manifest or a node."""
        mine: set[str] = set()

        def pin(name: str) -> None:
            with self._index.lock:
                if name not in mine:
                    mine.add(name)
                    self._counts[name] += 1

        try:
            yield pin
        finally:
            with self._index.lock:
                for name in mine:
                    self._counts[name] -= 1
                    if not self._counts[name]:
                        del self._counts[name]
                        self.forget(name)

    def forget(self, name: str) -> None:
        """Nobody counts on a part any more: it is no longer to be found, and a file without a name goes."""
        self.written.pop(name, None)
        self.placed.pop(name, None)
        waiting = self.fresh.pop(name, None)
        if waiting is not None:
            with suppress(OSError):  # one that can't be removed now goes when the store is opened next
                self._temporary.drop(waiting[1])
