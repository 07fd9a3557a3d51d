"""What every pass over the layers does, however many rows it takes at a time: norms, attention, the head."""

import numpy as np
from numpy.typing import NDArray

from serai.kernels.norms import attn_res, rms_norm
from serai.runtime.models.batch import Batch
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.layers import Context, kda_layer, mla_layer, product
from serai.runtime.models.weights import KdaWeights, Mixing, ModelWeights, MoeWeights

Floats = NDArray[np.float32]


class Backbone:
    """A model's layers without their feed-forward parts; holds weights and nothing that changes.

    `blocks` is float32 `[blocks, rows, hidden]`: the residual blocks committed so far, and behind them the running sum.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        is_kda = [isinstance(layer.attention, KdaWeights) for layer in weights.layers]
        self._of_kind = [is_kda[:index].count(kind) for index, kind in enumerate(is_kda)]

    def of_kind(self, index: int) -> int:
        """How many layers before this one have its kind of attention."""
        return self._of_kind[index]

    def attention(self, context: Context, index: int, batch: Batch, blocks: Floats, normed: Floats) -> Floats:
        """Layer `index` up to its feed-forward part, whose input is left in `normed`; gives the running sum."""
        layer, size = self.weights.layers[index], self.config.attn_res_block_size
        # AttnRes: where a block starts, the running sum is committed and this layer's output begins a new one.
        starts_block = size > 0 and index % size == 0
        committed = self._committed(index)
        self._norm(blocks, committed - starts_block, layer.attention_mixing, layer.input_norm, normed)
        running = self.running(index, blocks)
        number, add = self.of_kind(index), not starts_block
        if isinstance(layer.attention, KdaWeights):
            kda_layer(context, layer.attention, number, batch, normed, running, add=add)
        else:
            mla_layer(context, layer.attention, number, batch, normed, running, add=add)
        self._norm(blocks, committed, layer.ffn_mixing, layer.post_norm, normed)
        return running

    def skip_to(self, index: int, after: int, blocks: Floats, normed: Floats) -> None:
        """The input of layer `index`'s feed-forward part if nothing were added after layer `after` (-1: after the
        embedding), into `normed`."""
        layer = self.weights.layers[index]
        self._norm(blocks, self._committed(after), layer.ffn_mixing, layer.post_norm, normed)

    def running(self, index: int, blocks: Floats) -> Floats:
        """The running sum `[rows, hidden]` that layer `index` adds to."""
        running: Floats = blocks[self._committed(index)]
        return running

    def following(self, index: int) -> int | None:
        """The next layer after `index` (-1: the first of all) whose feed-forward part is a mixture of experts."""
        layers = self.weights.layers
        return next((at for at in range(index + 1, len(layers)) if isinstance(layers[at].ffn, MoeWeights)), None)

    def logits(self, context: Context, chosen: Floats) -> Floats:
        """Next-token logits `[rows, vocab]` of rows `chosen` out of the blocks, `[blocks, rows, hidden]`."""
        normed = np.empty(chosen.shape[1:], dtype=np.float32)
        committed = self._committed(len(self.weights.layers) - 1)
        self._norm(chosen, committed, self.weights.output_mixing, self.weights.norm, normed)
        logits = np.empty((len(normed), self.config.vocab_size), dtype=np.float32)
        product(context, normed, [(self.weights.head, 0)], logits)
        return logits

    def _committed(self, index: int) -> int:
        """Blocks committed when layer `index` has begun."""
        size = self.config.attn_res_block_size
        return 1 + index // size if size else 0

    def _norm(self, blocks: Floats, committed: int, mixing: Mixing | None, norm: Floats, out: Floats) -> None:
        """A sub-layer's input: the running sum, mixed with the committed blocks where there are any, normalised."""
        eps = self.config.rms_norm_eps
        if mixing is None or committed == 0:
            rms_norm(blocks[committed], 0, self.config.hidden_size, norm, eps, out, 0)
        else:
            attn_res(blocks, committed, blocks[committed], True, mixing.score, eps, norm, eps, out)
