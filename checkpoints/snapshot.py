"""The plain values that cross into and out of the store: layout, pages, snapshot and fingerprint.

Nothing here touches a disk. A snapshot whose parts disagree about its position, shape or type cannot be built.
"""

from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.files.streams import aligned_empty

CONV_PROJECTIONS: Final = 3  # q, k and v each have a short convolution


class LatentType(Enum):
    """How a token's latent is kept, from the largest form to the smallest.

    NumPy has no bfloat16, so those are carried as their bits in uint16. A Q8 latent is carried as bytes: an int8 code
    for each number, then two float32, the scales of the latent's two parts. Where the second begins is the model's to
    know.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    Q8 = "q8"

    @property
    def dtype(self) -> np.dtype[Any]:
        return _LATENT_DTYPES[self]

    def row_items(self, width: int) -> int:
        """How many elements of `dtype` keep a latent of `width` numbers."""
        return width + _Q8_SCALE_BYTES if self is LatentType.Q8 else width

    def row_bytes(self, width: int) -> int:
        """The same in bytes: from one token's latent to the next."""
        return self.row_items(width) * self.dtype.itemsize


_Q8_SCALE_BYTES: Final = 8
_LATENT_DTYPES: Final[dict[LatentType, np.dtype[Any]]] = {
    LatentType.FLOAT32: np.dtype("<f4"),
    LatentType.BFLOAT16: np.dtype("<u2"),
    LatentType.Q8: np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The shapes of one session's state; zero layers of either kind are allowed.

    `kda_shape` is `(layers, panels, key_dim, columns)`: a head's matrix is cut into panels of so many value columns, as
    the model has them in memory. Builds before that stored each head's matrix whole, `(layers, heads, key_dim,
    value_dim)`; at a `value_dim` of 16 the two coincide. `conv_shape` is `(layers, 3, taps, width)`.
    """

    kda_shape: tuple[int, int, int, int]
    conv_shape: tuple[int, int, int, int]
    mla_layers: int
    latent_width: int
    latent_type: LatentType
    page_tokens: int
    vocab: int

    def __post_init__(self) -> None:
        if min(*self.kda_shape, *self.conv_shape, self.mla_layers, self.latent_width, self.vocab) < 0:
            raise ValueError(f"a state layout has no negative sizes: {self}")
        if self.page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, not {self.page_tokens}")
        if self.kda_shape[0] != self.conv_shape[0]:
            raise ValueError(f"KDA state has {self.kda_shape[0]} layers but conv tails have {self.conv_shape[0]}")
        if self.conv_shape[1] != CONV_PROJECTIONS:
            raise ValueError(f"conv tails have {self.conv_shape[1]} projections, not {CONV_PROJECTIONS} (q, k, v)")

    def page_rows(self, position: int) -> tuple[int, ...]:
        """The number of rows in each latent page at `position` tokens: all full but perhaps the last."""
        if self.mla_layers == 0:
            return ()
        full, rest = divmod(position, self.page_tokens)
        return (self.page_tokens,) * full + ((rest,) if rest else ())

    @property
    def fixed_bytes(self) -> int:
        """Bytes of KDA state, conv tails and logits, which do not grow with the position."""
        kda = int(np.prod(self.kda_shape, dtype=np.int64))
        conv = int(np.prod(self.conv_shape, dtype=np.int64))
        return 4 * (kda + conv + self.vocab)

    @property
    def row_items(self) -> int:
        """Elements of a token's latent in one layer, of the latent type's dtype."""
        return self.latent_type.row_items(self.latent_width)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's latent in one layer."""
        return self.latent_type.row_bytes(self.latent_width)

    @property
    def token_bytes(self) -> int:
        """Bytes of latents one token adds over all MLA layers."""
        return self.mla_layers * self.row_bytes

    def describe(self) -> str:
        """One line that is equal exactly when two layouts are; used as the fingerprint's `state_layout`."""
        kda, conv = "x".join(map(str, self.kda_shape)), "x".join(map(str, self.conv_shape))
        latents = f"{self.mla_layers}x{self.latent_width} {self.latent_type.value} pages of {self.page_tokens}"
        return f"kda {kda} float32, conv {conv} float32, latents {latents}, logits {self.vocab}"


class PageIdentity:
    """Stands for the content of one latent page that will never change again.

    Make one when a page becomes full and keep it beside the page's buffer; every snapshot that holds the page passes
    the same object, and the store then knows the page without reading it. The store keeps no reference that would
    outlive it.
    """

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class LatentPage:
    """Latents of a run of tokens over all MLA layers: `rows` is `[mla_layers, rows, row_items]` as `LatentType` has it.

    `identity` is given only for full pages, whose buffer nobody writes again.
    """

    rows: NDArray[Any]
    identity: PageIdentity | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A session's whole state at one token position.

    Shapes follow `layout`: `kda` float32 `[layers, panels, key_dim, columns]`, `conv` float32 `[layers, 3, taps,
    width]`, pages as `LatentPage`, `logits` float32 `[vocab]` of the next token, `None` exactly at position 0. Arrays
    may be strided views: only the elements they show are ever stored. Token ids are kept by nodes, not here. `inexact`
    says that its bits are not those that the token ids give, here or where it was made: it comes from a snapshot that
    was stored with loss or of another build, and so does all that is computed from it.
    """

    position: int
    layout: StateLayout
    kda: NDArray[np.float32]
    conv: NDArray[np.float32]
    pages: tuple[LatentPage, ...]
    logits: NDArray[np.float32] | None
    inexact: bool = False

    def __post_init__(self) -> None:
        layout = self.layout
        if self.position < 0:
            raise ValueError(f"a snapshot's position cannot be {self.position}")
        _require("kda", self.kda, layout.kda_shape, np.dtype("<f4"))
        _require("conv", self.conv, layout.conv_shape, np.dtype("<f4"))
        rows = layout.page_rows(self.position)
        if len(self.pages) != len(rows):
            raise ValueError(
                f"position {self.position} takes {len(rows)} pages of {layout.page_tokens}, not {len(self.pages)}"
            )
        for number, (page, count) in enumerate(zip(self.pages, rows, strict=True)):
            shape = (layout.mla_layers, count, layout.row_items)
            _require(f"latent page {number}", page.rows, shape, layout.latent_type.dtype)
            if page.identity is not None and count < layout.page_tokens:
                raise ValueError(
                    f"latent page {number} holds {count} of {layout.page_tokens} rows, so it can change: no identity"
                )
        if (self.logits is None) != (self.position == 0):
            given = "no" if self.logits is None else "some"
            raise ValueError(
                f"there are {given} next-token logits at position {self.position}; only position 0 has none"
            )
        if self.logits is not None:
            _require("logits", self.logits, (layout.vocab,), np.dtype("<f4"))

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays together."""
        logits = 0 if self.logits is None else self.logits.nbytes
        return self.kda.nbytes + self.conv.nbytes + logits + sum(page.rows.nbytes for page in self.pages)


def _require(name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)} where {dtype} {list(shape)} belongs")


def new_snapshot(layout: StateLayout, position: int) -> Snapshot:
    """A snapshot of fresh arrays with nothing meaningful in them, each full page with a new identity."""
    return Snapshot(
        position=position,
        layout=layout,
        kda=aligned_empty(layout.kda_shape, np.dtype("<f4")),
        conv=aligned_empty(layout.conv_shape, np.dtype("<f4")),
        pages=tuple(
            LatentPage(
                aligned_empty((layout.mla_layers, rows, layout.row_items), layout.latent_type.dtype),
                PageIdentity() if rows == layout.page_tokens else None,
            )
            for rows in layout.page_rows(position)
        ),
        logits=None if position == 0 else aligned_empty((layout.vocab,), np.dtype("<f4")),
    )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a state depends on besides its token ids. Paths and times are not part of it.

    `weights` is the weight identity (hash of all safetensors headers and a sample of every tensor). `build` and `simd`
    stand apart: where only they differ the state is of the same model, but its bits may not continue alike.
    """

    config: str
    tokenizer: str
    chat_format: str
    precision: str
    trunk: str
    latents: str
    experts_per_token: int
    state_layout: str
    weights: str
    build: str
    simd: str

    def differences(self, other: "Fingerprint") -> list[str]:
        """Names of the model and option fields in which the two differ; empty when a state of one fits the other."""
        return [name for name in _MODEL_FIELDS if getattr(self, name) != getattr(other, name)]

    def build_differences(self, other: "Fingerprint") -> list[str]:
        """Which of `build` and `simd` differ; if any does, bit-exact continuation needs a replay of the token ids."""
        return [name for name in _BUILD_FIELDS if getattr(self, name) != getattr(other, name)]

    def as_json(self) -> dict[str, str | int]:
        return asdict(self)


_BUILD_FIELDS: Final = ("build", "simd")
_MODEL_FIELDS: Final = tuple(field.name for field in fields(Fingerprint) if field.name not in _BUILD_FIELDS)
