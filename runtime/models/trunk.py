"""How the trunk's matrices are held in memory: as the checkpoint has them, or smaller when asked.

What is held smaller are the projections that carry a model's bytes: queries, keys, values and outputs of both kinds of
attention, feed-forward layers, shared experts, the ways into and out of the experts' latent space, and the head. Never
quantised, whatever is asked (contract, f), are the router, every gate, norms, convolutions and Attention Residuals; nor
are the embedding (rows are only looked up in it, also where the head is tied to it), MLA's two small matrices a head,
and matrices whose columns are no multiple of 32. A q4 trunk has its head in 8 bits: every logit comes out of it.
"""

from enum import Enum

from serai.runtime.errors import BadParameter
from serai.runtime.models.tensor_table import TensorRole, TensorSpec

GROUP = 32
"""Columns that share a scale."""


class Held(Enum):
    """How one matrix is held, by the bytes that 32 weights of a row take; None is the checkpoint's own element type."""

    STORED = None
    Q8 = 34
    MXFP4 = 17

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a quantised matrix, `rows` a multiple of 16."""
        group_bytes: int | None = self.value
        if group_bytes is None:
            raise AssertionError("a matrix that is held as stored has its element type's bytes")
        return rows * (columns // GROUP) * group_bytes


class Trunk(Enum):
    """AS_STORED: the checkpoint's own element types. Q8: 8 bits a weight, a bfloat16 scale per 32 columns. Q4: 4 bits
    and a power of two, the MXFP4 of Kimi K3's experts."""

    AS_STORED = "as stored"
    Q8 = "q8"
    Q4 = "q4"

    @classmethod
    def parse(cls, name: "str | Trunk | None") -> "Trunk":
        """The trunk of that name, as stored for None. Raises `BadParameter`."""
        if name is None:
            return cls.AS_STORED
        try:
            return cls(name)
        except ValueError:
            raise BadParameter(f"trunk is 'q8', 'q4', or left out to keep it as stored, not {name!r}") from None

    def held(self, spec: TensorSpec) -> Held:
        """How a matrix of the trunk is held."""
        is_projection = spec.role in (TensorRole.MATRIX, TensorRole.HEAD)
        if self is Trunk.AS_STORED or not is_projection or spec.shape[1] % GROUP:
            return Held.STORED
        return Held.MXFP4 if self is Trunk.Q4 and spec.role is TensorRole.MATRIX else Held.Q8
