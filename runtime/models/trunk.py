"""How the trunk's matrices are held in memory: as the checkpoint has them, or in 8 bits when asked.

In 8 bits are the projections that carry a model's bytes: queries, keys, values and outputs of both kinds of attention,
feed-forward layers, shared experts, the ways into and out of the experts' latent space, and the head. Never quantised,
whatever is asked (DESIGN §6f), are the router, every gate, norms, convolutions and Attention Residuals; nor are the
embedding (rows are only looked up in it, also where the head is tied to it), MLA's two small matrices a head, and
matrices whose columns are no multiple of 32.
"""

from enum import Enum

from serai.runtime.errors import BadParameter
from serai.runtime.models.tensor_table import TensorRole, TensorSpec

Q8_GROUP = 32
"""Columns that share a scale."""
Q8_SCALE_BYTES = 2


class Trunk(Enum):
    """AS_STORED: the checkpoint's own element types. Q8: 8 bits a weight and a bfloat16 scale per 32 columns."""

    AS_STORED = "as stored"
    Q8 = "q8"

    @classmethod
    def parse(cls, name: "str | Trunk | None") -> "Trunk":
        """The trunk of that name, as stored for None. Raises `BadParameter`."""
        if name is None:
            return cls.AS_STORED
        if name == "q4":
            raise BadParameter("trunk is 'q4', for which there are no kernels; the smallest trunk there is is 'q8'")
        try:
            return cls(name)
        except ValueError:
            raise BadParameter(f"trunk is 'q8', or left out to keep it as stored, not {name!r}") from None

    def quantises(self, spec: TensorSpec) -> bool:
        """Whether a tensor of the trunk is held in 8 bits."""
        is_projection = spec.role in (TensorRole.MATRIX, TensorRole.HEAD)
        return self is Trunk.Q8 and is_projection and spec.shape[1] % Q8_GROUP == 0


def q8_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix held in 8 bits, `rows` a multiple of 16."""
    return rows * (columns + columns // Q8_GROUP * Q8_SCALE_BYTES)
