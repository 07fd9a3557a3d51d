"""The working memory of one step, made once for the largest step and reused by every layer."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from serai.kernels.arrays import aligned
from serai.kernels.kda import kda_scratch_floats
from serai.kernels.mla_line import mla_scratch_floats
from serai.kernels.quantize import Quantized
from serai.kernels.threads import threads
from serai.runtime.models.config import ExpertFormat, ModelConfig
from serai.runtime.models.scratch_shape import FOUND, ScratchShape
from serai.runtime.models.trunk import Trunk

K = TypeVar("K")
V = TypeVar("V")

_MOST_VIEWS = 256


def kernel_scratch_bytes(config: ModelConfig, rows: int, *, fast: bool) -> int:
    """Bytes beside the buffers of `ScratchShape` for steps of `rows` rows: what the compute threads keep for themselves
    and, for packed experts in `fast` precision, 8-bit activations."""
    mla, moe = config.mla, config.moe
    floats = kda_scratch_floats(config.kda.head_dim, threads())
    total = 4 * (floats + mla_scratch_floats(mla.kv_lora_rank, mla.rope_dim, threads()))
    if moe is not None and config.expert_format is ExpertFormat.MXFP4 and fast:
        total += Quantized.bytes_needed(rows, moe.latent)
        total += Quantized.bytes_needed(rows * moe.experts_per_token, moe.inner)
    return total


class Scratch:
    """Flat buffers handed out as `[rows, width]` views, so that every product is contiguous."""

    def __init__(self, config: ModelConfig, max_rows: int, *, fast: bool, trunk: Trunk = Trunk.AS_STORED) -> None:
        shape = self._shape = ScratchShape.of(config)
        self.rows = max_rows
        pairs = max_rows * shape.picks
        widths = {
            "blocks": shape.blocks * shape.hidden,
            "normed": shape.hidden,
            "projected": shape.projected,
            "wide": shape.wide,
            "second": shape.second,
            "mixed": shape.mixed,
            "inner": shape.picks * shape.expert_inner,
            "expert_out": shape.picks * shape.expert_out,
            "pick_weights": shape.picks,
            "scores": shape.experts,
        }
        self._floats = {name: aligned(max_rows * width, np.float32) for name, width in widths.items()}
        self._picks = np.empty(pairs, dtype=np.int32)
        self.pairs = np.empty(pairs, dtype=np.int32)
        self.distinct = np.empty(shape.distinct(max_rows), dtype=np.int32)
        self.addresses = np.empty(shape.distinct(max_rows), dtype=np.int64)
        self.starts = np.empty(shape.starts(max_rows), dtype=np.int32)
        self.found = np.zeros(FOUND, dtype=np.int32)
        kda, mla, moe = config.kda, config.mla, config.moe
        self.kda = aligned(kda_scratch_floats(kda.head_dim, threads()), np.float32)
        self.mla = aligned(mla_scratch_floats(mla.kv_lora_rank, mla.rope_dim, threads()), np.float32)
        # 8-bit activations: the rows as the experts read them, and every pair's inner activations.
        self.quantised: tuple[Quantized, Quantized] | None = None
        if moe is not None and config.expert_format is ExpertFormat.MXFP4 and fast:
            self.quantised = Quantized.empty(max_rows, moe.latent), Quantized.empty(pairs, moe.inner)
        # A step asks for the same few views as the one before, hundreds of times.
        self._views: dict[tuple[str, int, int], NDArray[np.float32]] = {}
        self._parts: dict[tuple[int, int], Quantized] = {}
        self._activations: Quantized | None = None
        if trunk is not Trunk.AS_STORED and fast:
            self._activations = Quantized.empty(max_rows, shape.inputs)

    @property
    def bytes(self) -> int:
        """Bytes of all buffers together."""
        arrays = [*self._floats.values(), self._picks, self.pairs, self.distinct, self.addresses, self.starts]
        arrays += [self.found, self.kda, self.mla]
        held = [*(self.quantised or ()), *([] if self._activations is None else [self._activations])]
        return sum(one.nbytes for one in [*arrays, *held])

    def view(self, name: str, rows: int, width: int) -> NDArray[np.float32]:
        """Buffer `name` as float32 `[rows, width]`; what it holds is unknown."""
        view = self._views.get((name, rows, width))
        if view is None:
            view = self._floats[name][: rows * width].reshape(rows, width)
            _keep(self._views, (name, rows, width), view)
        return view

    def spare(self, name: str, rows: int, width: int, number: int = 1) -> NDArray[np.float32]:
        """As `view`, but behind what that gives, or `number` times as far: for steps that leave so much room unused."""
        start = number * rows * width
        return self._floats[name][start : start + rows * width].reshape(rows, width)

    def activations(self, rows: int, columns: int) -> Quantized:
        """Room for that many rows as 8-bit numbers, for a product with quantised weights; what it holds is unknown."""
        part = self._parts.get((rows, columns))
        if part is None:
            if self._activations is None:
                raise AssertionError("8-bit activations are for a quantised trunk in fast precision")
            part = self._activations.part(rows, columns)
            _keep(self._parts, (rows, columns), part)
        return part

    def blocks(self, rows: int) -> NDArray[np.float32]:
        """The residual blocks, float32 `[blocks, rows, hidden]`; the running sum lies behind the committed ones."""
        count, hidden = self._shape.blocks, self._shape.hidden
        return self._floats["blocks"][: count * rows * hidden].reshape(count, rows, hidden)

    def picks(self, rows: int) -> NDArray[np.int32]:
        """The experts each row is sent to, int32 `[rows, experts_per_token]`."""
        return self._picks[: rows * self._shape.picks].reshape(rows, self._shape.picks)

    def spare_picks(self, rows: int) -> NDArray[np.int32]:
        """As `picks`, behind what that gives."""
        count = rows * self._shape.picks
        return self._picks[count : 2 * count].reshape(rows, self._shape.picks)


def _keep(held: dict[K, V], key: K, value: V) -> None:
    """Remember a view; all others are forgotten when there are many, of steps of many sizes."""
    if len(held) >= _MOST_VIEWS:
        held.clear()
    held[key] = value
