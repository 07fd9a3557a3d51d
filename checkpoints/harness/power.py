"""What a power cut may take back: bytes not yet fsynced, and names in folders not yet fsynced.

A file system promises no more than that, so a store must be whole even if every such change is lost. A killed process
alone never shows it, because the kernel finishes what the process began.
"""

import os
from collections.abc import Callable
from pathlib import Path


class Unsynced:
    """The changes of one process that no fsync has made durable, and a way to undo them all."""

    def __init__(self) -> None:
        self._files: set[Path] = set()
        self._undo: list[tuple[Path, Callable[[], object]]] = []

    def wrote(self, fd: int) -> None:
        self._files.add(_path(fd))

    def synced(self, fd: int) -> None:
        """An fsync of a file or a folder has succeeded."""
        path = _path(fd)
        self._files.discard(path)
        self._undo = [(folder, undo) for folder, undo in self._undo if folder != path]

    def renaming(self, name: str, new_name: str, folder: int, new_folder: int) -> None:
        """A file is about to be renamed. Until then what has the new name keeps it: one of the two is always there."""
        old, new = _path(folder) / name, _path(new_folder) / new_name
        if old in self._files:
            self._files.discard(old)
            self._files.add(new)
        before = new.read_bytes() if new.is_file() else None
        self._undo.append((new.parent, lambda: _put_back(new, before)))

    def linked(self, name: str, new_name: str, folder: int) -> None:
        """A file, fsynced already, has got a second name."""
        new = _path(folder) / new_name
        self._undo.append((new.parent, lambda: new.unlink(missing_ok=True)))

    def made_folder(self, name: str, parent: int) -> None:
        made = _path(parent) / name
        self._undo.append((made.parent, lambda: _remove(made)))

    def unlinking(self, name: str, folder: int) -> None:
        """A file is about to be unlinked."""
        path = _path(folder) / name
        if path.is_file():
            data = path.read_bytes()
            self._undo.append((path.parent, lambda: path.write_bytes(data)))

    def cut_power(self) -> None:
        """Take everything back, latest first, and empty the files whose bytes were not fsynced."""
        for _, undo in reversed(self._undo):
            undo()
        for path in self._files:
            if path.is_file():
                os.truncate(path, 0)


def _path(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


def _put_back(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(data)


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
