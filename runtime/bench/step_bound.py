"""The least time a step can take on a machine: what its products move and multiply, over what the machine gives."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from serai.kernels.matrix import Format, Matrix
from serai.runtime.bench.kernels import Peaks
from serai.runtime.models.open_model import LoadedModel
from serai.runtime.state import Part, part_bytes


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one step: weights and fixed states through memory, and operations of matrix products. Attention over latents
    and everything a row has to itself are left out, so the bound is a little lower than it need be."""

    nbytes: float
    int8_operations: float
    float32_operations: float

    def least_s(self, peaks: Peaks) -> float:
        """Seconds with all reads at the rate of a stream, or all products at that of registers, whichever is more."""
        computing = self.int8_operations / peaks.int8 + self.float32_operations / peaks.float32
        return max(self.nbytes / peaks.read, computing)

    def limit(self, peaks: Peaks) -> str:
        """What `least_s` is the time of, in words."""
        if self.nbytes / peaks.read >= self.least_s(peaks):
            return f"{self.nbytes / 1e9:.2f} GB at a stream read's {peaks.read / 1e9:.1f} GB/s"
        products = (
            f"{self.int8_operations / 1e12:.2f} TOP in 8 bits and {self.float32_operations / 1e12:.2f} in float32"
        )
        return f"{products} at {peaks.int8 / 1e9:.0f} and {peaks.float32 / 1e9:.0f} GOP/s in registers"


def step_cost(loaded: LoadedModel, rows: int, sessions: int) -> StepCost:
    """A step of `rows` rows of `sessions` sessions together, in `fast` precision, logits for the last of each.

    How many different experts the rows visit is reckoned as if each picked its own at random.
    """
    weights, moe, experts = loaded.model.weights, loaded.model.config.moe, loaded.model.experts
    nbytes = 2.0 * sessions * part_bytes(loaded.layout, Part.FIXED)
    operations = {True: 0.0, False: 0.0}
    for matrix, used in [*((one, rows) for one in _matrices(weights.layers)), (weights.head, sessions)]:
        nbytes += matrix.nbytes
        operations[_is_8_bit(matrix.format)] += 2.0 * used * matrix.heads * matrix.rows * matrix.cols
    if moe is not None and experts is not None:
        layers = sum(loaded.model.config.layer_is_moe)
        visited = moe.experts * (1 - (1 - moe.experts_per_token / moe.experts) ** rows)
        nbytes += layers * visited * experts.layout.record_bytes
        one_expert = 2.0 * 3 * moe.inner * moe.latent
        operations[_is_8_bit(experts.layout.format)] += layers * rows * moe.experts_per_token * one_expert
    return StepCost(nbytes, operations[True], operations[False])


def _is_8_bit(weight_format: Format) -> bool:
    """Whether such weights meet 8-bit activations."""
    return weight_format in (Format.Q8, Format.MXFP4)


def _matrices(value: Any) -> Iterator[Matrix]:
    """Every matrix under a weights value."""
    if isinstance(value, Matrix):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _matrices(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _matrices(getattr(value, name))
