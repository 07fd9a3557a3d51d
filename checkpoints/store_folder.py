"""An open store folder: the lock, the index, the edge where foreign errors are mapped, and the unlinking of erased
files.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from serai.checkpoints.errors import SessionGone, StoreClosed, StoreFailed, StoreFull
from serai.checkpoints.files.disk import Disk, mapped
from serai.checkpoints.files.folders import Folder
from serai.checkpoints.files.parts import PartFiles
from serai.checkpoints.files.ranks import give_way
from serai.checkpoints.index import Index
from serai.checkpoints.opening import INDEX_NAME, open_folders
from serai.checkpoints.pins import Pins
from serai.checkpoints.rows import FileKind, NodeRow
from serai.checkpoints.saving import Shelf


class StoreFolder:
    """What `Tree` and `Store` stand on: one opened folder, held by this process alone until `close`."""

    def __init__(
        self,
        path: str,
        *,
        disk: Disk,
        create: bool,
        read_only: bool,
        threads: int,
        keep_cached: bool,
        now: Callable[[], float],
    ) -> None:
        self._read_only = read_only
        self._now = now
        with ExitStack() as undo:
            self._folders = open_folders(path, disk, create=create, read_only=read_only)
            undo.callback(self._folders.close)
            self.location: Final = self._folders.path
            self.id: Final = self._folders.store_id
            self._index = Index(
                f"{self.location}/{INDEX_NAME}", may_begin=self._folders.is_empty, disk=disk, read_only=read_only
            )
            undo.callback(self._index.close)
            # Apart, so that a save that hangs on a slow disk does not keep anyone from loading.
            writers = ThreadPoolExecutor(threads, "serai-store-save", give_way)
            undo.callback(writers.shutdown)
            # More of them: those that wait for their turn to hash ask nothing of the disk. Of the 2.4 GB/s that one
            # gave, six threads loaded 1.2 to 2.1 and twelve 1.8 to 2.3.
            readers = ThreadPoolExecutor(2 * threads, "serai-store-load", give_way)
            undo.callback(readers.shutdown)
            self._files = PartFiles(self._folders.parts, self._folders.temporary, direct=not keep_cached)
            self._pins = Pins(self._index, self._folders.temporary)
            self._shelf = Shelf(self._files, self._index, self._pins, writers, readers)
            self._closed = False
            self._running = 0
            self._changed = threading.Condition()
            self._depth = threading.local()
            self._sweep()
            undo.pop_all()

    def close(self) -> None:
        """Let running calls end and begin no more, then give the folder free. Closing twice is allowed."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: self._running == 0)
        self._shelf.writers.shutdown()
        self._shelf.readers.shutdown()
        self._index.close()
        self._folders.close()

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """A call on the store: foreign errors become this project's, at this edge, and `close` waits for its end."""
        depth = getattr(self._depth, "calls", 0)
        with self._changed:
            if self._closed and depth == 0:
                raise StoreClosed(path=self.location)
            self._running += 1
        self._depth.calls = depth + 1
        try:
            yield
        except OSError as error:
            raise mapped(error, path=self.location, doing=what) from error
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise StoreFull(path=self.location, doing=what) from error
            raise StoreFailed(path=self.location, doing=what, reason=str(error)) from error
        finally:
            self._depth.calls = depth
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def now(self) -> float:
        """The store's clock: Unix time in seconds."""
        return self._now()

    @contextmanager
    def reading_index(self) -> Iterator[Index]:
        """The index, with nothing changing meanwhile."""
        with self._doing("reading the index"), self._index.lock:
            yield self._index

    def _row(self, node_id: str) -> NodeRow:
        row = self._index.node(node_id)
        if row is None:
            raise SessionGone(name=node_id)
        return row

    @contextmanager
    def _settled_before(self) -> Iterator[dict[str, str]]:
        """Whole files that are on the disk already and only lack their final name: the temporary one of each by that.
        Those that nobody has given it by the end of the block go."""
        settled: dict[str, str] = {}
        try:
            yield settled
        finally:
            for temporary in settled.values():
                with suppress(OSError):  # one that can't be removed now goes when the store is opened next
                    self._folders.temporary.remove(temporary)

    def _write_temporary(self, data: bytes) -> str:
        return self._folders.temporary.write_temporary([data], size_bytes=len(data), direct=False)

    def _write_file(self, data: bytes, folder: Folder, name: str, settled: dict[str, str] | None = None) -> None:
        """Write a whole file durably under its final name, unless it only lacks that."""
        temporary = None if settled is None else settled.pop(name, None)
        self._folders.temporary.publish(temporary or self._write_temporary(data), folder, name)
        with self._taking_back(folder, name):
            folder.sync()

    def _replace_file(self, data: bytes, folder: Folder, name: str) -> None:
        """Put a file in the place of another durably; after a kill one of the two is there."""
        self._folders.temporary.publish(self._write_temporary(data), folder, name)
        folder.sync()

    @contextmanager
    def _taking_back(self, folder: Folder, name: str) -> Iterator[None]:
        """Remove a file again if the step that was to make it visible fails."""
        try:
            yield
        except BaseException:
            folder.remove(name)
            raise

    def _sweep(self) -> None:
        """Unlink, durably, every file whose row is gone and that no running save, load or copy counts on."""
        if self._read_only:
            return
        with self._index.lock:
            due = [item for item in self._index.erasures() if not self._pins.count(item.name)]
            if not due:
                return
            folders = {
                FileKind.NODE: self._folders.nodes,
                FileKind.MANIFEST: self._folders.manifests,
                FileKind.TAG: self._folders.tags,
            }
            for kind, folder in folders.items():
                names = [item.name for item in due if item.kind is kind]
                for name in names:
                    folder.remove(name)
                if names:
                    folder.sync()
            self._files.remove(item.name for item in due if item.kind is FileKind.PART)
            with self._index.change():
                self._index.erased(due)
            self._index.flush()

    @contextmanager
    def _holding(self, what: str) -> Iterator[Callable[[str], None]]:
        """A call, as by `_doing`, that is given a function to pin a part until its end, or a manifest or a node. What
        was erased meanwhile is unlinked then."""
        with self._doing(what):
            try:
                with self._pins.held() as pin:
                    yield pin
            finally:
                self._sweep_if_possible()

    def _sweep_if_possible(self) -> None:
        """Sweep after work that is done already: files that cannot be unlinked now go with the next sweep."""
        with suppress(OSError, sqlite3.OperationalError):
            self._sweep()
