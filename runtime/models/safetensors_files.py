"""A model folder's safetensors files as one mapping from tensor name to where it lies, and plain reads from it.

Headers are read and checked when the folder is opened; the files stay open, so what was checked is what is read
later. Data is read into arrays the caller owns, never mapped: a mapped file that is cut underneath a process kills it
by signal, while a read fails with an error that names the file.
"""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import WeightsInvalid
from serai.runtime.models.dtypes import STORAGE, as_float32
from serai.runtime.models.safetensors_header import LENGTH_BYTES, TensorInfo, header_bytes, parse_header, wrong_size
from serai.runtime.models.strict_json import JsonError, parse_json_object, shown

INDEX_NAME = "model.safetensors.index.json"
MOST_INDEX_BYTES = 1 << 28
"""K3's index, half a million names, is about 60 MB."""


class CheckpointFiles:
    """The tensors of one model folder; use `open`, and `close` (or `with`) when done.

    Reads are positional, so any number of threads may read at once.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo], shards: Mapping[str, "Shard"]) -> None:
        self.folder = folder
        self.tensors = tensors
        self._shards = shards

    @classmethod
    def open(cls, folder: Path) -> "CheckpointFiles":
        """Read and check every header. Raises `WeightsInvalid`, naming the tensor and the file.

        With an index each tensor is taken from the file the index maps it to; files it doesn't list, and other
        copies of the tensor in files it does list, are ignored. Without one, all `*.safetensors` count and no tensor
        may be in two of them.
        """
        weight_map = _read_index(folder)
        # File by the name of a tensor it should hold, to name one if the file is missing.
        holds = (
            _files_without_index(folder) if weight_map is None else {file: name for name, file in weight_map.items()}
        )
        shards: dict[str, Shard] = {}
        try:
            for file in sorted(holds):
                shards[file] = Shard.open(folder, file, holds[file])
            if weight_map is None:
                tensors = _merge(tensor for shard in shards.values() for tensor in shard.read_header())
            else:
                tensors = _pick(weight_map, shards)
        except BaseException:
            for shard in shards.values():
                shard.close()
            raise
        return cls(folder, MappingProxyType(tensors), shards)

    def read(self, name: str) -> NDArray[Any]:
        """The tensor as an array of its own; BF16 as uint16 bits. Raises `WeightsInvalid` if the file was cut since."""
        info = self.info(name)
        out = np.empty(info.shape, dtype=STORAGE[info.dtype])
        self.read_into(name, out)
        return out

    def read_float32(self, name: str) -> NDArray[np.float32]:
        """The tensor widened to float32, exactly; for F32, BF16 and F16."""
        return as_float32(self.read(name), self.info(name).dtype)

    def read_into(self, name: str, out: NDArray[Any]) -> None:
        """Read into `out`: C-contiguous, writable, and of exactly the tensor's size in bytes (any type and shape)."""
        info = self.info(name)
        if not (out.flags.c_contiguous and out.flags.writeable) or out.nbytes != info.nbytes:
            raise ValueError(
                f"{name} needs a writable C-contiguous array of {info.nbytes:,} bytes, not {out.nbytes:,} "
                f"(contiguous: {out.flags.c_contiguous}, writable: {out.flags.writeable})"
            )
        self._shards[info.file].read_into(info.offset, out.reshape(-1).view(np.uint8).data)

    def read_bytes(self, name: str, start: int, nbytes: int) -> bytes:
        """Part of a tensor's data as stored: `nbytes` from `start`, both within the tensor."""
        info = self.info(name)
        if not 0 <= start <= start + nbytes <= info.nbytes:
            raise ValueError(f"bytes [{start:,}, {start + nbytes:,}) are not all within the {info.nbytes:,} of {name}")
        data = bytearray(nbytes)
        self._shards[info.file].read_into(info.offset + start, memoryview(data))
        return bytes(data)

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies. Raises `WeightsInvalid` when there is none of that name."""
        info = self.tensors.get(name)
        if info is None:
            raise WeightsInvalid(f"{self.folder} holds no tensor {shown(name)}")
        return info

    def path_of(self, info: TensorInfo) -> Path:
        """The file a tensor lies in."""
        return self.folder / info.file

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files in use, relative to the folder, in order."""
        return tuple(self._shards)

    def close(self) -> None:
        """Close the files; reading afterwards is an error. Closing twice is harmless."""
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CheckpointFiles {self.folder}: {len(self.tensors):,} tensors in {len(self._shards)} files>"


class Shard:
    """One open safetensors file."""

    def __init__(self, name: str, path: Path, descriptor: int, size_bytes: int) -> None:
        self.name = name
        self.path = path
        self.size_bytes = size_bytes
        self._descriptor = descriptor

    @classmethod
    def open(cls, folder: Path, name: str, holds: str) -> "Shard":
        """Open a file of the folder by the name an index gives it; `holds` is a tensor that should be in it.

        Raises `WeightsInvalid`.
        """
        path = _inside(folder, name)
        try:
            # Non-blocking, so that a pipe put where a shard should be is refused below instead of waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise WeightsInvalid(
                f"the shard {name}, which should hold tensor {shown(holds)}, is missing from {folder}"
            ) from None
        except OSError as error:
            raise WeightsInvalid(f"the shard {path} can't be opened ({error.strerror})") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise WeightsInvalid(f"the shard {path} is not a regular file")
        return cls(name, path, descriptor, status.st_size)

    def read_header(self) -> list[TensorInfo]:
        """The checked tensors of this file."""
        field = bytearray(min(LENGTH_BYTES, self.size_bytes))
        self.read_into(0, memoryview(field))
        header = bytearray(header_bytes(self.name, self.size_bytes, bytes(field)))
        self.read_into(LENGTH_BYTES, memoryview(header))
        return parse_header(self.name, bytes(header), self.size_bytes)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset` on. Raises `WeightsInvalid` if the file has become too short or fails to read."""
        if self._descriptor < 0:
            raise ValueError(f"{self.path} is closed")
        done = 0
        while done < len(out):
            try:
                # One call moves at most 2 GiB, and may always move less than asked.
                count = os.preadv(self._descriptor, [out[done:]], offset + done)
            except OSError as error:
                raise WeightsInvalid(
                    f"{self.path} can't be read at byte {offset + done:,} ({error.strerror})"
                ) from error
            if count == 0:
                raise wrong_size(self.name, os.fstat(self._descriptor).st_size, f"{self.size_bytes:,}")
            done += count

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    try:
        size = path.stat().st_size
        if size > MOST_INDEX_BYTES:
            raise WeightsInvalid(f"{path} is {size:,} bytes long, over the limit of {MOST_INDEX_BYTES:,}")
        data = path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise WeightsInvalid(f"{path} is a link to a file that is not there; fetch it again") from None
        return None
    except OSError as error:
        raise WeightsInvalid(f"{path} can't be read ({error.strerror})") from error
    try:
        weight_map = parse_json_object(data).get("weight_map")
    except JsonError as error:
        raise WeightsInvalid(f"{path} {error}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsInvalid(f"{path}: weight_map must be an object from tensor to file, not {shown(weight_map)}")
    files: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise WeightsInvalid(f"{path}: the file of tensor {shown(tensor)} must be a string, not {shown(file)}")
        weight_map[tensor] = files.setdefault(file, file)  # one string a file, not one a tensor
    return weight_map


def _files_without_index(folder: Path) -> dict[str, str]:
    """All safetensors files of the folder; nothing says which tensors they should hold."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    except OSError as error:
        raise WeightsInvalid(f"the model folder {folder} can't be listed ({error.strerror})") from error
    if not names:
        raise WeightsInvalid(f"{folder} holds neither {INDEX_NAME} nor a *.safetensors file")
    return dict.fromkeys(names, "")


def _merge(tensors: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for tensor in tensors:
        other = merged.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise WeightsInvalid(
                f"tensor {shown(tensor.name)} is in both {other.file} and {tensor.file}, and without {INDEX_NAME} "
                "nothing says which counts; remove one of the files"
            )
    return merged


def _pick(weight_map: dict[str, str], shards: Mapping[str, Shard]) -> dict[str, TensorInfo]:
    picked: dict[str, TensorInfo] = {}
    for shard in shards.values():
        for tensor in shard.read_header():
            if weight_map.get(tensor.name) == shard.name:
                picked[tensor.name] = tensor
    if len(picked) != len(weight_map):
        lost = next(name for name in weight_map if name not in picked)
        raise WeightsInvalid(
            f"{INDEX_NAME} says tensor {shown(lost)} is in {weight_map[lost]}, but that file doesn't hold it"
        )
    return picked


def _inside(folder: Path, name: str) -> Path:
    """The path of a shard; refused when it leads out of the folder.

    The one way out that is allowed is the Hugging Face cache's own: a link from `snapshots/<commit>/` into the
    `blobs/` folder beside `snapshots/`.
    """
    parts = Path(name).parts
    if not parts or not name.isprintable() or Path(name).is_absolute() or ".." in parts:
        raise WeightsInvalid(f"the shard path {shown(name)} is not a path within the model folder {folder}")
    path = folder / name
    home, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    if target.is_relative_to(home):
        return path
    if home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs":
        return path
    raise WeightsInvalid(f"the shard {path} is a link out of the model folder, to {target}")
