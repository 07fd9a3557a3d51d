"""A pass over the layers with thousands of rows, so that a layer's experts are read once for all of them.

Each layer is done for all rows before the next: its attention a tile of rows at a time, in the scratch of an ordinary
step, then its experts one after the other, each for every row that picked it, then what is made of their sum, in tiles
again. A row's bits are those of any other way to cut the rows: what is written here is the order of the work, not the
work. Only what must outlive a tile is held for all rows.
"""

import ctypes
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from serai.kernels.arrays import aligned
from serai.kernels.matmul import gather_rows
from serai.runtime.experts.access import Visit, Wait
from serai.runtime.models.backbone import Backbone, Floats
from serai.runtime.models.batch import Batch, Outputs, cut_rows
from serai.runtime.models.layers import Context, dense_layer
from serai.runtime.models.mixture import add_experts, expert_inputs, route_rows, shared_inner
from serai.runtime.models.scratch_shape import ScratchShape
from serai.runtime.models.weights import KdaWeights, MoeWeights
from serai.runtime.models.wide_experts import Routed, routed_experts


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows `[first, end)` of the pass. With `goes_on` its first segment began in the tile before."""

    first: int
    end: int
    batch: Batch
    blocks: Floats
    goes_on: bool


class WidePass:
    """Room for passes of up to `most_rows` rows in tiles of `tile_rows`, for a model with experts."""

    def __init__(self, backbone: Backbone, context: Context, most_rows: int, tile_rows: int) -> None:
        """The scratch of `context`, for `tile_rows` rows, is used between pauses only; its failures are this pass's."""
        self._backbone = backbone
        self._context = context
        self._tile_rows = tile_rows
        self.most_rows = most_rows
        shape, moe = ScratchShape.of(context.config), context.moe
        self._width = shape.blocks * shape.hidden
        self._blocks = aligned(most_rows * self._width, np.float32)
        self._source = aligned(most_rows * moe.latent, np.float32).reshape(most_rows, moe.latent)
        self._shared = aligned(most_rows * moe.shared_inner, np.float32).reshape(most_rows, moe.shared_inner)
        self._routed = Routed.empty(most_rows, moe.experts_per_token, moe.latent, shape.distinct(most_rows))
        # A session's state between two tiles; KDA can't be computed in place.
        self._between = aligned(prod(context.layout.kda_shape) + prod(context.layout.conv_shape), np.float32)

    @property
    def bytes(self) -> int:
        """Bytes of all buffers together, as `ScratchShape.wide_bytes` plans them."""
        own = (self._blocks, self._source, self._shared, self._between)
        return sum(one.nbytes for one in own) + self._routed.bytes

    def forward(self, batch: Batch) -> Generator[Wait | None, None, Outputs]:
        """As `KimiModel.forward`; it pauses after each tile and each few experts."""
        if batch.rows > self.most_rows:
            raise ValueError(f"{batch.rows} rows are more than the {self.most_rows} this model has room for")
        context, weights = self._context, self._backbone.weights
        context.failures.clear()
        tiles = list(self._tiles(batch))
        for tile in tiles:
            gather_rows(weights.embedding, tile.batch.tokens, tile.blocks[0])
        routed = self._routed.first(batch.rows)
        expected: Visit | None = None
        try:
            for index, layer in enumerate(weights.layers):
                moe = layer.ffn if isinstance(layer.ffn, MoeWeights) else None
                if moe is not None and expected is None:
                    expected = context.experts.expect(index)
                for tile in tiles:
                    self._tile(index, tile)
                    yield None
                if moe is not None:
                    ids, picks = routed.group(context.moe.experts), routed.picks.size
                    with closing(context.experts.visit(index, ids, picks, expected=expected)) as visit:
                        following = self._backbone.following(index)
                        expected = None if following is None else context.experts.expect(following)
                        yield from routed_experts(context, visit, self._source[: batch.rows], routed)
                    for tile in tiles:
                        self._from_experts(moe, index, tile)
                        yield None
        finally:
            if expected is not None:
                expected.close()
        return Outputs(self._logits(batch, tiles), dict(context.failures))

    def _tiles(self, batch: Batch) -> Iterator[_Tile]:
        shape, between = ScratchShape.of(self._context.config), self._between.ctypes.data
        for first in range(0, batch.rows, self._tile_rows):
            end = min(first + self._tile_rows, batch.rows)
            blocks = self._blocks[first * self._width : end * self._width]
            cut, goes_on = cut_rows(batch, first, end, between)
            yield _Tile(first, end, cut, blocks.reshape(shape.blocks, end - first, shape.hidden), goes_on)

    def _tile(self, index: int, tile: _Tile) -> None:
        """A tile's attention, and what follows it up to the routed experts."""
        context, layer = self._context, self._backbone.weights.layers[index]
        normed = context.scratch.view("normed", tile.end - tile.first, context.config.hidden_size)
        if tile.goes_on and isinstance(layer.attention, KdaWeights):
            self._carry_over(self._backbone.of_kind(index), tile.batch)
        running = self._backbone.attention(context, index, tile.batch, tile.blocks, normed)
        if isinstance(layer.ffn, MoeWeights):
            self._into_experts(layer.ffn, tile, normed)
        else:
            dense_layer(context, layer.ffn, normed, running)

    def _carry_over(self, number: int, batch: Batch) -> None:
        """Copy what the KDA layer `number` has left of the tile's first session to where it is read from."""
        kda, conv = self._context.layout.kda_shape, self._context.layout.conv_shape
        for start, size in ((0, prod(kda[1:])), (prod(kda), prod(conv[1:]))):
            offset = 4 * (start + number * size)
            ctypes.memmove(int(batch.state_in[0]) + offset, int(batch.state_out[0]) + offset, 4 * size)

    def _into_experts(self, moe: MoeWeights, tile: _Tile, normed: Floats) -> None:
        """Everything that a tile's experts will need, kept for all rows."""
        context, rows = self._context, slice(tile.first, tile.end)
        scores = context.scratch.view("scores", len(normed), context.moe.experts)
        route_rows(context, moe, normed, scores, self._routed.picks[rows], self._routed.weights[rows])
        source, column, projected = expert_inputs(context, moe, normed)
        self._source[rows] = source[:, column : column + context.moe.latent]
        if moe.shared_down is not None:
            shared_inner(context, moe, projected, self._shared[rows])

    def _from_experts(self, moe: MoeWeights, index: int, tile: _Tile) -> None:
        rows = slice(tile.first, tile.end)
        shared = None if moe.shared_down is None else self._shared[rows]
        add_experts(self._context, moe, self._routed.sums[rows], shared, self._backbone.running(index, tile.blocks))

    def _logits(self, batch: Batch, tiles: Sequence[_Tile]) -> NDArray[np.float32]:
        places = [divmod(int(row), self._tile_rows) for row in batch.logit_rows]
        shape = ScratchShape.of(self._context.config)
        chosen = np.empty((shape.blocks, len(places), shape.hidden), dtype=np.float32)
        for number, (tile, row) in enumerate(places):
            chosen[:, number] = tiles[tile].blocks[:, row]
        return self._backbone.logits(self._context, chosen)
