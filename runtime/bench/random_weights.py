"""Random values for a model's tensors, scaled so that activations stay of order one and logits spread over about ±3.

A tensor's values depend on the seed, its name and its shape only: not on the other tensors, nor on how they are cut
into shards.
"""

from math import sqrt
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench.write_checkpoint import StoredTensor
from serai.runtime.models.tensor_table import TensorRole

_E2M1_RMS = 2.93
"""Root mean square of the sixteen MXFP4 values, each equally likely."""


def random_tensor(name: str, tensor: StoredTensor, role: TensorRole, heads: int, seed: int) -> NDArray[Any]:
    """The values of one tensor as stored (BF16 as uint16 bits); `heads` is how many entries of A_log are in use."""
    rng = np.random.default_rng((seed, crc32(name.encode())))
    if tensor.dtype in ("U8", "F8_E8M0"):
        return _packed(name, tensor, rng)
    values = _values(name, tensor, role, heads, rng)
    return values if tensor.dtype == "F32" else to_bf16(values)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 of each finite number, ties to even, as bits."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _values(
    name: str, tensor: StoredTensor, role: TensorRole, heads: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    shape = tensor.shape
    if role is TensorRole.DECAY:
        return (_decay_rates(shape, heads, rng) if name.endswith("A_log") else _time_steps(shape, rng)).astype(
            np.float32
        )
    values = rng.standard_normal(shape, dtype=np.float32)
    if role is TensorRole.NORM or name.endswith("_norm.weight"):
        return (1 + 0.1 * values).astype(np.float32)
    # Unit variance of a product's entries; more for the head and for the mixing scores, which a softmax follows.
    gain = {
        TensorRole.EMBEDDING: sqrt(shape[-1]),
        TensorRole.HEAD: 3.0,
        TensorRole.MIX: 2.0,
        TensorRole.CONV: 0.5 * sqrt(shape[-1]),
        TensorRole.BIAS: 0.1 * sqrt(shape[-1]),
    }.get(role, 1.0)
    return (values * np.float32(gain / sqrt(shape[-1]))).astype(np.float32)


def _decay_rates(shape: tuple[int, ...], heads: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """A_log: decay rates between 1 and 16 for the heads, zeros for the padding."""
    flat = np.zeros(int(np.prod(shape)))
    flat[:heads] = np.log(rng.uniform(1, 16, heads))
    return flat.reshape(shape)


def _time_steps(shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float64]:
    """dt_bias: what softplus takes to a step between 0.001 and 0.1, evenly spread in its logarithm."""
    steps = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
    return steps + np.log(-np.expm1(-steps))


def _packed(name: str, tensor: StoredTensor, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Any two 4-bit weights a byte; scales of a few neighbouring powers of two around unit variance of a product."""
    if name.endswith("_packed"):
        return rng.integers(0, 256, tensor.shape, dtype=np.uint8)
    columns = 32 * tensor.shape[-1]
    centre = 127 - round(np.log2(_E2M1_RMS * sqrt(columns)))
    return rng.integers(centre - 1, centre + 2, tensor.shape, dtype=np.uint8)
