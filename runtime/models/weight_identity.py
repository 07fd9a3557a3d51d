"""One hash that says which weights these are, from a little of their data."""

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from serai.runtime.models.safetensors_files import CheckpointFiles

SAMPLE_BYTES = 4096
"""Read of each tensor, from its middle: the ends of a tensor are where padding lives."""

_READERS = 8
_CHUNK = 512


def weight_identity(files: CheckpointFiles) -> str:
    """Hex blake3 of every tensor's name, element type, shape and sample, in order of names.

    It covers what all headers say except where the bytes lie, so the same weights in other shards are the same
    weights; paths and times have no part in it. A change that spares every sample goes unseen: this tells models
    apart, it doesn't verify downloads. Raises `WeightsInvalid` if a file can't be read.

    K3 has half a million tensors, hence the few reading threads: one disk access after another would take a minute.
    """
    names = sorted(files.tensors)
    chunks = [names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK)]
    total = blake3()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="weight-identity") as readers:
        for digest in readers.map(lambda chunk: _digest(files, chunk), chunks):
            total.update(digest)
    return total.hexdigest()


def _digest(files: CheckpointFiles, names: Sequence[str]) -> bytes:
    result = blake3()
    for name in names:
        info = files.tensors[name]
        encoded = name.encode("utf-8")
        # Lengths first, so that no two lists of tensors spell the same bytes.
        result.update(struct.pack("<II", len(encoded), len(info.shape)) + encoded)
        result.update(info.dtype.encode().ljust(8) + struct.pack(f"<{len(info.shape)}Q", *info.shape))
        count = min(SAMPLE_BYTES, info.nbytes)
        result.update(files.read_bytes(name, (info.nbytes - count) // 2, count))
    return result.digest()
