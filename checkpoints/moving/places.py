"""Places far away: named objects in a bucket, on another machine or in another folder, to push to and pull from.

A URL names a place and a path the folder of a store, whatever is there: what a store's record calls the other side of
a move must mean the same when that side is asked again, from another folder, years later.
"""

import errno
import importlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from serai.checkpoints.errors import PlaceFailed, PlaceUnknown, SeraiError, SnapshotCorrupt
from serai.checkpoints.files.disk import FOLDER_MODE, Disk
from serai.checkpoints.files.folders import Folder
from serai.checkpoints.files.streams import write_pieces
from serai.checkpoints.format import MAX_PART_BYTES, part_file_bytes
from serai.checkpoints.opening import STORE_NAME

_LOCAL_SCHEMES: Final = ("file", "local")
_TEMPORARY: Final = ".unfinished-"
MAX_OBJECT_BYTES: Final = part_file_bytes(MAX_PART_BYTES)
"""No object that was ever put is larger, so nothing larger is read into memory."""


class Place(Protocol):
    """Where objects are kept, by names with slashes. What goes wrong on the way is `PlaceFailed`."""

    def existing(self, sizes: Mapping[str, int]) -> set[str]:
        """Those of the named objects that are there with just these bytes."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write an object; when it returns it is there for others, whole."""
        ...

    def get(self, name: str) -> bytes:
        """An object's bytes; `FileNotFoundError` if there is none, `SnapshotCorrupt` if it can't be one of ours."""
        ...


class DecidingPlace(Place, Protocol):
    """A place that can also settle who comes first, as moving a session needs."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if there is none of this name, in one step whoever else tries; whether there was none."""
        ...

    def names(self, folder: str) -> list[str]:
        """The objects directly below a folder of names, by the last part of their names; none if there is no such."""
        ...


def is_url(target: str) -> bool:
    """Whether `target` names a place; else it is the folder of a store."""
    return "://" in target


def place_at(url: str) -> DecidingPlace:
    """The place of a URL: a folder of this machine, or what fsspec understands (`s3://bucket/folder`, `sftp://...`).

    Sessions are moved through a folder or a bucket only; the others copy. `PlaceUnknown` for what is no URL, for the
    folder of a store, and without fsspec or what it needs for this kind of URL; `PlaceFailed` for a folder that can't
    be looked into.
    """
    scheme, _, rest = url.partition("://")
    if is_url(url) and scheme not in _LOCAL_SCHEMES:
        return FsspecPlace(url)
    folder = Path(rest)
    if not is_url(url) or not folder.is_absolute():
        problem = "a place is named by a URL, one in a folder from the root on: file:///folder, s3://bucket/folder"
        raise PlaceUnknown(url=url, problem=problem)
    try:
        is_store = (folder / STORE_NAME).is_file()
    except OSError as error:  # a folder that one may not read, or a name that none can have
        reason = error.strerror or str(error)
        raise PlaceFailed(url=url, doing="looking whether a store lies there", reason=reason) from error
    if is_store:
        raise PlaceUnknown(url=url, problem=f"a store lies in that folder, and is named by its path: {folder}")
    return FolderPlace(rest)


_CANT_DECIDE = (
    "it can't write a file only if there is none, which moving a session needs; push and pull copy without moving"
)
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP})
_DECIDING = frozenset({"s3", "s3a", "memory"})
"""Whose `pipe_file(mode="create")` is one conditional write. The one that others inherit looks first and then writes,
so two who decide at once would both be first."""


def _check_size(name: str, size_bytes: int) -> None:
    if size_bytes > MAX_OBJECT_BYTES:
        problem = f"it has {size_bytes} bytes, and no object of a place has more than {MAX_OBJECT_BYTES}"
        raise SnapshotCorrupt(what=name, problem=problem)


class FolderPlace:
    """A folder of this machine, or one that is mounted; what was put is on the disk when `put` returns."""

    def __init__(self, path: str, *, disk: Disk | None = None) -> None:
        self._root = Path(path).resolve()
        self._disk = disk or Disk()

    def existing(self, sizes: Mapping[str, int]) -> set[str]:
        found = set()
        with self._reaching("looking what is there"):
            for name, size in sizes.items():
                with suppress(FileNotFoundError):
                    if (self._root / name).stat(follow_symlinks=False).st_size == size:
                        found.add(name)
        return found

    def put(self, name: str, data: bytes) -> None:
        with self._reaching(f"writing {name}"), self._written(name, data) as (folder, temporary, last):
            self._disk.rename(temporary, last, folder=folder.fd, new_folder=folder.fd)
            folder.sync()

    def create(self, name: str, data: bytes) -> bool:
        with self._reaching(f"writing {name}"), self._written(name, data) as (folder, temporary, last):
            try:
                # Unlike a rename, a link never takes the place of another file, and unlike an exclusive open it shows
                # nothing before all is there.
                self._disk.link(temporary, last, folder=folder.fd)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise PlaceUnknown(url=f"file://{self._root}", problem=_CANT_DECIDE) from error
            finally:
                folder.remove(temporary)
            folder.sync()
            return True

    @contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[tuple[Folder, str, str]]:
        """The object's folder, an fsynced temporary file with the data in it, and the name it is to have."""
        parent, _, last = name.rpartition("/")
        folder = self._folder(parent)
        try:
            temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
            fd = self._disk.create(temporary, folder=folder.fd)
            try:
                try:
                    write_pieces(self._disk, fd, [data], direct=False)
                    self._disk.fsync(fd)
                finally:
                    os.close(fd)
                yield folder, temporary, last
            except BaseException:
                folder.remove(temporary)
                raise
        finally:
            folder.close()

    def _folder(self, name: str) -> Folder:
        """An open folder below the root, made durably if it is missing."""
        made = [place for place in (self._root, *self._root.parents) if not place.exists()]
        self._root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        for place in made:
            self._sync(place.parent)
        return self._below(name, self._open_or_make)

    def _open_or_make(self, parent: Folder, step: str) -> Folder:
        try:
            return parent.open_child(step, create=False)
        except FileNotFoundError:
            with suppress(FileExistsError):
                self._disk.make_folder(step, parent=parent.fd)
            parent.sync()
            return parent.open_child(step, create=False)

    def _below(self, name: str, step_into: Callable[[Folder, str], Folder]) -> Folder:
        """An open folder below the root, reached one step after the other and through no symlink."""
        folder = Folder(self._disk, self._disk.open_folder(str(self._root), parent=None))
        for step in filter(None, name.split("/")):
            try:
                below = step_into(folder, step)
            finally:
                folder.close()
            folder = below
        return folder

    def _sync(self, place: Path) -> None:
        folder = Folder(self._disk, self._disk.open_folder(str(place), parent=None))
        try:
            folder.sync()
        finally:
            folder.close()

    def get(self, name: str) -> bytes:
        parent, _, last = name.rpartition("/")
        with self._reaching(f"reading {name}", missing_stays=True):
            folder = self._below(parent, lambda above, step: above.open_child(step, create=False))
            try:
                with folder.reading(last, name) as reader:
                    _check_size(name, reader.size_bytes)
                    return bytes(reader.take(reader.size_bytes))
            finally:
                folder.close()

    def names(self, folder: str) -> list[str]:
        with self._reaching(f"listing {folder}"):
            try:
                return [entry for entry in os.listdir(self._root / folder) if not entry.startswith(_TEMPORARY)]  # noqa: PTH208
            except FileNotFoundError:
                return []

    @contextmanager
    def _reaching(self, doing: str, *, missing_stays: bool = False) -> Iterator[None]:
        """An `OSError` becomes `PlaceFailed`; that of a missing file stays what it is if `missing_stays`."""
        try:
            yield
        except OSError as error:
            if missing_stays and isinstance(error, FileNotFoundError):
                raise
            reason = error.strerror or str(error)
            raise PlaceFailed(url=f"file://{self._root}", doing=doing, reason=reason) from error


class FsspecPlace:
    """A place named by a URL that fsspec understands: `s3://bucket/folder`, `sftp://...`."""

    def __init__(self, url: str, **options: Any) -> None:
        """`options` go to fsspec's file system. `PlaceUnknown` without fsspec or what it needs for this kind of URL."""
        self._url = url
        try:
            core = importlib.import_module("fsspec.core")
            self._files, self._root = core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise PlaceUnknown(url=url, problem=str(error)) from error

    def existing(self, sizes: Mapping[str, int]) -> set[str]:
        found = set()
        with self._reaching("looking what is there"):
            for name, size in sizes.items():
                with suppress(FileNotFoundError):
                    if self._files.info(f"{self._root}/{name}")["size"] == size:
                        found.add(name)
        return found

    def put(self, name: str, data: bytes) -> None:
        with self._reaching(f"writing {name}"):
            self._files.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        with self._reaching(f"writing {name}"):
            kinds = self._files.protocol
            if not _DECIDING & set((kinds,) if isinstance(kinds, str) else kinds):
                raise PlaceUnknown(url=self._url, problem=_CANT_DECIDE)
            try:
                self._files.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def _path(self, name: str) -> str:
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        return path

    def get(self, name: str) -> bytes:
        with self._reaching(f"reading {name}"):
            _check_size(name, self._files.info(f"{self._root}/{name}")["size"])
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
        return data

    def names(self, folder: str) -> list[str]:
        with self._reaching(f"listing {folder}"):
            try:
                found = self._files.ls(f"{self._root}/{folder}", detail=False)
            except FileNotFoundError:
                return []
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]

    @contextmanager
    def _reaching(self, doing: str) -> Iterator[None]:
        """What file systems of every kind raise becomes `PlaceFailed`, at this edge; a missing file stays one."""
        self._files.invalidate_cache()  # a listing that was kept would hide what others put meanwhile
        try:
            yield
        except (FileNotFoundError, SeraiError):
            raise
        except Exception as error:
            raise PlaceFailed(url=self._url, doing=doing, reason=str(error) or type(error).__name__) from error
