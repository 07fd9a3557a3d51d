"""Bytes a tensor takes once it is loaded, from its shape and element type alone.

Matrices keep their element type, unless a smaller trunk is asked for, and are packed in blocks of 16 output rows, the
last block filled up with zeros; small vectors are widened to float32. An expert is one record of whole pages, so that
it can be read from disk by itself.
"""

from math import prod

from serai.runtime.models.config import ModelConfig
from serai.runtime.models.dtypes import STORAGE
from serai.runtime.models.tensor_table import TensorRole, TensorSpec
from serai.runtime.models.trunk import Held, Trunk

BLOCK_ROWS = 16
"""Output rows of a packed matrix that lie interleaved, one to a lane."""

RECORD_BYTES = 4096
"""Records are multiples of this: what direct reads from any disk need."""

_VECTORS = frozenset((TensorRole.NORM, TensorRole.CONV, TensorRole.DECAY, TensorRole.BIAS, TensorRole.MIX))


def held_bytes(config: ModelConfig, spec: TensorSpec, dtype: str, trunk: Trunk = Trunk.AS_STORED) -> int:
    """Bytes in memory of a tensor of the trunk that is stored as `dtype`."""
    if spec.role is TensorRole.FOLDED:
        return 0
    if spec.role in _VECTORS:
        return 4 * prod(spec.shape)
    itemsize = STORAGE[dtype].itemsize
    if spec.role is TensorRole.KV_UP:
        # In absorbed form: [kv_lora, nope] and [v, kv_lora] for each head.
        mla = config.mla
        keys = padded_rows(mla.kv_lora_rank) * mla.nope_dim
        return mla.heads * (keys + padded_rows(mla.v_dim) * mla.kv_lora_rank) * itemsize
    rows, columns = spec.shape
    held = trunk.held(spec)
    if held is not Held.STORED:
        return held.nbytes(padded_rows(rows), columns)
    return padded_rows(rows) * columns * itemsize


def expert_record_bytes(parts: dict[str, TensorSpec], dtypes: dict[str, str]) -> int:
    """Bytes of the record that holds one routed expert, from its tensors and how each is stored."""
    used = sum(
        padded_rows(spec.shape[0]) * spec.shape[1] * STORAGE[dtypes[part]].itemsize for part, spec in parts.items()
    )
    return -(-used // RECORD_BYTES) * RECORD_BYTES


def padded_rows(rows: int) -> int:
    """Output rows of a matrix with its last block filled up."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS
