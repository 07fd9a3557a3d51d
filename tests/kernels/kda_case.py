"""A KDA layer with random parameters and the two ways to run it: the kernel, and the definition in float64."""

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serai.kernels import naive, threads
from serai.kernels.kda import kda, kda_scratch_floats
from serai.kernels.kda_panels import PANEL, panels_of, to_matrices, to_panels

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

PAD = 5
"""Floats before the layer's parts in a block and columns around them in a row: other layers', not to be touched."""
BEHIND = 1024
"""Floats behind the scratch, which must stay NaN."""


def aligned(n: int) -> F32:
    """`n` floats from a 64-byte boundary, all NaN."""
    raw = np.full(n + 16, np.nan, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    return raw[start : start + n]


@dataclass
class Inputs:
    """Projections of some tokens."""

    q: F32
    k: F32
    v: F32
    z: F32
    b: F32
    gate: F32

    def rows(self, first: int, last: int) -> "Inputs":
        return Inputs(*(getattr(self, name)[first:last] for name in ("q", "k", "v", "z", "b", "gate")))

    @staticmethod
    def join(parts: list["Inputs"]) -> "Inputs":
        names = ("q", "k", "v", "z", "b", "gate")
        return Inputs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def __len__(self) -> int:
        return len(self.b)


@dataclass
class Case:
    """Parameters of a layer; `block(state)` is a session's block that holds it, with strangers' floats around."""

    heads: int
    head_dim: int
    lower_bound: float
    seed: int = 0
    eps: float = 1e-5
    conv: F32 = field(init=False)
    rate: F32 = field(init=False)
    bias: F32 = field(init=False)
    o_norm: F32 = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.conv = (rng.standard_normal((3, 4, self.channels)) * 0.5).astype(np.float32)
        self.rate = np.exp(rng.uniform(0, 2.7, self.heads)).astype(np.float32)
        self.bias = rng.standard_normal(self.channels).astype(np.float32)
        self.o_norm = (1 + 0.1 * rng.standard_normal(self.head_dim)).astype(np.float32)

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def matrix_floats(self) -> int:
        return self.heads * panels_of(self.head_dim) * self.head_dim * PANEL

    @property
    def conv_offset(self) -> int:
        return PAD + self.matrix_floats + PAD

    @property
    def block_floats(self) -> int:
        return self.conv_offset + 9 * self.channels + PAD

    def inputs(self, tokens: int, seed: int = 1, gate_scale: float = 1.0) -> Inputs:
        rng = np.random.default_rng(seed)
        q, k, v, z, gate = rng.standard_normal((5, tokens, self.channels)).astype(np.float32)
        b = rng.standard_normal((tokens, self.heads)).astype(np.float32)
        return Inputs(q, k, v, (z * gate_scale).astype(np.float32), b, gate)

    def random_block(self, seed: int = 2) -> F32:
        block = aligned(self.block_floats)
        panels, tails = self.stored(block)
        rng = np.random.default_rng(seed)
        panels[:] = to_panels(rng.standard_normal((self.heads, self.head_dim, self.head_dim)) * 0.1)
        tails[:] = rng.standard_normal(tails.shape)
        return block

    def stored(self, block: F32) -> tuple[F32, F32]:
        """Views of a block's state, in panels, and conv tails."""
        panels = block[PAD : PAD + self.matrix_floats].reshape(-1, self.head_dim, PANEL)
        tails = block[self.conv_offset : self.conv_offset + 9 * self.channels].reshape(3, 3, self.channels)
        return panels, tails

    def parts(self, block: F32) -> tuple[F32, F32]:
        """A block's state matrices and conv tails."""
        panels, tails = self.stored(block)
        return to_matrices(panels, self.heads, self.head_dim), tails

    def joined(self, block: F32) -> F32:
        """A block's state and conv tails, side by side."""
        return np.concatenate([part.ravel() for part in self.stored(block)])

    def weights(self) -> naive.KdaWeights:
        conv = np.swapaxes(self.conv, 1, 2).astype(np.float64)
        rate, bias, o_norm = (x.astype(np.float64) for x in (self.rate, self.bias, self.o_norm))
        return naive.KdaWeights(conv, rate, bias, o_norm, self.eps, self.lower_bound)

    def define(self, x: Inputs, block: F32 | None) -> tuple[F64, F64, F64]:
        """Output, state matrix and tails by the definition in float64; no block is an empty session."""
        state = naive.empty_kda_state(self.heads, self.head_dim)
        if block is not None:
            matrix, tails = self.parts(block)
            state = naive.KdaState(matrix.astype(np.float64), tails.astype(np.float64))
        q, k, v, z, b, gate = (part.astype(np.float64) for part in (x.q, x.k, x.v, x.z, x.b, x.gate))
        out, after = naive.kda(q, k, v, z, b, gate, self.weights(), state)
        return out, after.matrix, after.tails

    def run(
        self, segments: list[tuple[Inputs, F32 | None]], scratch_threads: int | None = None
    ) -> tuple[list[F32], list[F32]]:
        """Outputs and new blocks of a ragged batch by the kernel, all memory NaN before."""
        x = Inputs.join([inputs for inputs, _ in segments])
        rows, c = len(x), self.channels
        proj = np.full((rows, 4 * PAD + 3 * c), np.nan, np.float32)
        columns = [PAD + i * (c + PAD) for i in range(3)]
        for column, part in zip(columns, (x.v, x.q, x.k), strict=True):
            proj[:, column : column + c] = part
        beta_and_gate = np.concatenate([x.b, x.gate], axis=1)
        out = np.full((rows, c + 2 * PAD), np.nan, np.float32)
        starts = np.cumsum([0, *(len(inputs) for inputs, _ in segments)])
        blocks = [aligned(self.block_floats) for _ in segments]
        floats = kda_scratch_floats(self.head_dim, scratch_threads or threads.threads())
        memory = np.full(floats + BEHIND, np.nan, np.float32)
        kda(
            proj,
            columns[1],
            columns[2],
            columns[0],
            x.z,
            0,
            beta_and_gate,
            0,
            beta_and_gate,
            self.heads,
            self.conv,
            self.rate,
            self.bias,
            self.o_norm,
            self.eps,
            self.lower_bound,
            self.heads,
            self.head_dim,
            starts.astype(np.int64),
            np.array([0 if block is None else block.ctypes.data for _, block in segments]),
            np.array([block.ctypes.data for block in blocks]),
            PAD,
            self.conv_offset,
            out,
            PAD,
            memory[:floats],
        )
        assert np.isnan(memory[floats:]).all()
        assert np.isnan(out[:, :PAD]).all()
        assert np.isnan(out[:, -PAD:]).all()
        for block in blocks:
            strangers = (block[:PAD], block[PAD + self.matrix_floats : self.conv_offset], block[-PAD:])
            assert np.isnan(np.concatenate(strangers)).all()
        kept = out[:, PAD:-PAD]
        return [kept[a:b].copy() for a, b in itertools.pairwise(starts)], blocks

    def feed(self, x: Inputs, lengths: list[int], block: F32 | None = None) -> tuple[F32, F32]:
        """One session fed in calls of these lengths: all outputs, and the last block."""
        assert sum(lengths) == len(x)
        outs, first = [], 0
        for length in lengths:
            out, blocks = self.run([(x.rows(first, first + length), block)])
            outs.append(out[0])
            block = blocks[0]
            first += length
        assert block is not None
        return np.concatenate(outs), block
