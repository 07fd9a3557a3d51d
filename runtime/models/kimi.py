"""The forward pass of Kimi-Linear and Kimi K3, written as model-spec §3: a batch of rows in, next-token logits out.

Every layer works on all rows at once, whichever session they belong to; only KDA's recurrence and MLA's attention look
at which rows belong together. Nothing here decides anything: it is the formulas, in order.
"""

from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.kernels.kda import kda, kda_scratch_floats
from serai.kernels.matmul import gather_rows, matmul
from serai.kernels.mla import attend, store_latents
from serai.kernels.moe import activate, combine, experts, group, route
from serai.kernels.norms import attn_res, rms_norm, sigmoid_gate
from serai.runtime.models.batch import Batch
from serai.runtime.models.config import LayerKind, ModelConfig
from serai.runtime.models.scratch import Scratch, ScratchShape
from serai.runtime.models.weights import (
    DenseWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    Mixing,
    ModelWeights,
    MoeWeights,
)


class KimiModel:
    """A loaded model with the scratch of one step; `forward` is the only thing it does."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, layout: StateLayout, max_rows: int) -> None:
        self.config = config
        self.weights = weights
        self.layout = layout
        self.scratch = Scratch(ScratchShape.of(config, weights), max_rows)

    def forward(self, batch: Batch) -> Generator[None, None, NDArray[np.float32]]:
        """Run the batch through all layers, pausing between them; the generator's value is the logits.

        Logits are float32 `[len(batch.logit_rows), vocab_size]`. The caller may drop the generator at any pause: what
        was written are drafts only.
        """
        rows = batch.rows
        blocks = self.scratch.blocks(rows)
        gather_rows(self.weights.embedding, batch.tokens, blocks[0])
        committed = 0
        kda_index = mla_index = 0
        for index, layer in enumerate(self.weights.layers):
            normed = self._normed(blocks, committed, layer.attention_mixing, layer.input_norm)
            # AttnRes: at a block's start the running sum is committed, and a new one begins with this layer's output.
            starts_block = self.config.attn_res_block_size > 0 and index % self.config.attn_res_block_size == 0
            committed += starts_block
            running = blocks[committed]
            if isinstance(layer.attention, KdaWeights):
                self._kda(layer.attention, kda_index, batch, normed, running, add=not starts_block)
                kda_index += 1
            else:
                self._mla(layer.attention, mla_index, batch, normed, running, add=not starts_block)
                mla_index += 1
            normed = self._normed(blocks, committed, layer.ffn_mixing, layer.post_norm)
            if isinstance(layer.ffn, MoeWeights):
                self._moe(layer.ffn, normed, running)
            else:
                self._dense(layer.ffn, normed, running)
            yield
        return self._logits(batch, blocks, committed)

    def _normed(
        self, blocks: NDArray[np.float32], committed: int, mixing: Mixing | None, norm: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """The sub-layer's input: the running sum (mixed with the committed blocks), normalised."""
        rows, hidden = blocks.shape[1:]
        out = self.scratch.view("normed", rows, hidden)
        eps = self.config.rms_norm_eps
        if mixing is None or committed == 0:
            rms_norm(blocks[committed], 0, hidden, norm, eps, out, 0)
        else:
            attn_res(blocks, committed, blocks[committed], True, mixing.score, eps, norm, eps, out)
        return out

    def _logits(self, batch: Batch, blocks: NDArray[np.float32], committed: int) -> NDArray[np.float32]:
        """Next-token logits of the wanted rows only: the head is the largest matrix of a small model."""
        chosen = np.ascontiguousarray(blocks[:, batch.logit_rows])
        normed = np.empty(chosen.shape[1:], dtype=np.float32)
        self._normed(chosen, committed, self.weights.output_mixing, self.weights.norm, normed)
        logits = np.empty((len(batch.logit_rows), self.config.vocab_size), dtype=np.float32)
        matmul(normed, 0, self.weights.head, logits, 0)
        return logits
