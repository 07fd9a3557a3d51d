"""Opening a store's folder: safe to use, held by one process, complete, and swept of unfinished files."""

import fcntl
import os
import stat
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serai.checkpoints.errors import StoreBusy, StoreInvalid
from serai.checkpoints.files import jsonio
from serai.checkpoints.files.disk import FOLDER_MODE, Disk
from serai.checkpoints.files.folders import Folder
from serai.checkpoints.format import DocumentKind, frame_document, read_document
from serai.checkpoints.names import new_id

INDEX_NAME: Final = "index.sqlite"
_INDEX_NAMES: Final = frozenset({INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm", f"{INDEX_NAME}-journal"})
_LOCK_NAME: Final = "lock"
STORE_NAME: Final = "store"
POINTS_NAME: Final = "points"
"""A folder that places have and stores don't (see `remote`)."""
_FOLDER_NAMES: Final = ("nodes", "manifests", "parts", "tags", "owners", "tmp")
NEW_INDEX_NAME: Final = f"{INDEX_NAME}.new"
_KNOWN_NAMES: Final = _INDEX_NAMES | {_LOCK_NAME, STORE_NAME, *_FOLDER_NAMES}


@dataclass(frozen=True, slots=True)
class OpenFolders:
    """An opened store: its folders by descriptor, and the lock that `close` gives back."""

    path: str
    store_id: str
    root: Folder
    nodes: Folder
    manifests: Folder
    parts: Folder
    tags: Folder
    owners: Folder
    temporary: Folder
    lock_fd: int | None
    is_empty: bool

    def close(self) -> None:
        folders = (self.nodes, self.manifests, self.parts, self.tags, self.owners, self.temporary, self.root)
        for folder in folders:
            folder.close()
        if self.lock_fd is not None:
            os.close(self.lock_fd)  # and with it the lock


def open_folders(
    path: str, disk: Disk, *, create: bool, needs_index: bool = True, read_only: bool = False
) -> OpenFolders:
    """Open the store at `path`, or make one there; `read_only` changes nothing and takes no lock.

    `StoreInvalid` if the folder is missing, is no store, belongs to someone else or others may write to it; `StoreBusy`
    if another process holds it; `OSError` if the system refuses.
    """
    place = Path(path).resolve()
    path = str(place)
    if not place.is_dir():
        if not create or place.exists():
            problem = "it is no folder" if place.exists() else "there is no such folder"
            raise StoreInvalid(path=path, problem=problem, remedy="name the folder of an existing store")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(FOLDER_MODE)
    with ExitStack() as undo:
        root = Folder(disk, disk.open_folder(path, parent=None))
        undo.callback(root.close)
        _check_owner(root, path)
        names = set(root.names())
        if STORE_NAME not in names and (not create or names - _KNOWN_NAMES):
            if POINTS_NAME in names:
                problem, remedy = "it is a place that sessions were pushed to", f"name that by its URL, file://{path}"
            else:
                problem, remedy = "it is no serai store", "name an empty or new folder to make one"
            raise StoreInvalid(path=path, problem=problem, remedy=remedy)
        lock_fd = None if read_only else _lock(root, path)
        if lock_fd is not None:
            undo.callback(os.close, lock_fd)
        folders = {}
        for name in _FOLDER_NAMES:
            folders[name] = root.open_child(name, create=not read_only)
            undo.callback(folders[name].close)
        if not read_only:
            root.sync()
            for name in folders["tmp"].names():
                folders["tmp"].remove(name)
        store_id = _store_id(root, folders["tmp"])
        is_empty = needs_index and _check_index(root, folders["nodes"], path)
        undo.pop_all()
    return OpenFolders(
        path=path,
        store_id=store_id,
        root=root,
        nodes=folders["nodes"],
        manifests=folders["manifests"],
        parts=folders["parts"],
        tags=folders["tags"],
        owners=folders["owners"],
        temporary=folders["tmp"],
        lock_fd=lock_fd,
        is_empty=is_empty,
    )


def _check_owner(root: Folder, path: str) -> None:
    status = os.fstat(root.fd)
    if status.st_uid != os.geteuid():
        raise StoreInvalid(
            path=path,
            problem=f"it belongs to user {status.st_uid} and this is user {os.geteuid()}",
            remedy="use a folder of your own",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreInvalid(
            path=path, problem="other users may write to it", remedy=f"take that right away with `chmod go-w {path}`"
        )


def _lock(root: Folder, path: str) -> int:
    """A descriptor of the lock file, locked; the kernel gives the lock back when its owner dies, however it dies."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(_LOCK_NAME, flags, 0o600, dir_fd=root.fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise StoreBusy(path=path, pid=int(owner) if owner.isdecimal() else None) from None
    except OSError:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    return fd


def _store_id(root: Folder, temporary: Folder) -> str:
    """The id in the store's own document, which is written if it is not there yet."""
    what = "the store's own document"
    try:
        with root.reading(STORE_NAME, what) as reader:
            return jsonio.field(jsonio.decode(read_document(reader, DocumentKind.STORE).data, what), "id", str, what)
    except FileNotFoundError:
        store_id = new_id()
        body = jsonio.encode({"id": store_id, "created_s": time.time()})
        data = frame_document(DocumentKind.STORE, body).data
        name = temporary.write_temporary([data], size_bytes=len(data), direct=False)
        temporary.publish(name, root, STORE_NAME)
        root.sync()
        return store_id


def _check_index(root: Folder, nodes: Folder, path: str) -> bool:
    """Whether the store is empty, so that an index may be begun; its file exists afterwards, private and no symlink."""
    for name in _INDEX_NAMES & set(root.names()):
        if not stat.S_ISREG(os.stat(name, dir_fd=root.fd, follow_symlinks=False).st_mode):
            raise StoreInvalid(
                path=path, problem=f"{name} is no regular file", remedy="remove it and rebuild the index"
            )
    empty = not nodes.names()
    if INDEX_NAME not in root.names():
        if not empty:
            remedy = "rebuild it from the files with `serai sessions fsck --rebuild`"
            raise StoreInvalid(path=path, problem="its index is missing", remedy=remedy)
        os.close(
            os.open(
                INDEX_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=root.fd
            )
        )
    return empty
