"""The forward pass of Kimi-Linear and Kimi K3, written as model-spec §3: a batch of rows in, next-token logits out.

Every layer works on all rows at once, whichever session they belong to; only KDA's recurrence and MLA's attention look
at which rows belong together. Nothing here decides anything: it is the formulas, in order.
"""

from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import StateLayout
from serai.kernels.matmul import gather_rows
from serai.kernels.norms import attn_res, rms_norm
from serai.runtime.experts.access import Experts, Wait
from serai.runtime.models.batch import Batch, Outputs
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.layers import Context, dense_layer, kda_layer, mla_layer, moe_layer, product
from serai.runtime.models.scratch import Scratch
from serai.runtime.models.trunk import Trunk
from serai.runtime.models.weights import KdaWeights, Mixing, ModelWeights, MoeWeights


class KimiModel:
    """A loaded model with the scratch of one step; `forward` is the only thing it does."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        experts: Experts | None,
        layout: StateLayout,
        *,
        max_rows: int,
        fast: bool,
        trunk: Trunk = Trunk.AS_STORED,
        looks_ahead: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.experts = experts
        self.layout = layout
        self.max_rows = max_rows
        self.scratch = Scratch(config, max_rows, fast=fast, trunk=trunk)
        self._context = Context(config, layout, self.scratch, experts, fast, looks_ahead)

    @property
    def bytes(self) -> int:
        """Bytes of trunk, experts and scratch."""
        return self.weights.bytes + self.expert_bytes + self.scratch.bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes that the routed experts take in memory."""
        return 0 if self.experts is None else self.experts.nbytes

    def close(self) -> None:
        """Stop reading experts. The model can't be run after."""
        if self.experts is not None:
            self.experts.close()

    def forward(self, batch: Batch) -> Generator[Wait | None, None, Outputs]:
        """Run the batch through all layers; the generator's value is the logits.

        It pauses between layers, giving None, and where experts are being read, giving what to wait for. The caller may
        drop it at any pause: what was written are drafts only.
        """
        self._context.failures.clear()
        blocks = self.scratch.blocks(batch.rows)
        normed = self.scratch.view("normed", batch.rows, self.config.hidden_size)
        gather_rows(self.weights.embedding, batch.tokens, blocks[0])
        block_size = self.config.attn_res_block_size
        committed = kda_layers = mla_layers = 0
        for index, layer in enumerate(self.weights.layers):
            self._norm(blocks, committed, layer.attention_mixing, layer.input_norm, normed)
            # AttnRes: where a block starts, the running sum is committed and this layer's output begins a new one.
            starts_block = block_size > 0 and index % block_size == 0
            committed += starts_block
            running = blocks[committed]
            if isinstance(layer.attention, KdaWeights):
                kda_layer(self._context, layer.attention, kda_layers, batch, normed, running, add=not starts_block)
                kda_layers += 1
            else:
                mla_layer(self._context, layer.attention, mla_layers, batch, normed, running, add=not starts_block)
                mla_layers += 1
            self._norm(blocks, committed, layer.ffn_mixing, layer.post_norm, normed)
            if isinstance(layer.ffn, MoeWeights):
                yield from moe_layer(self._context, layer.ffn, index, self._following(index), normed, running)
            else:
                dense_layer(self._context, layer.ffn, normed, running)
            yield None
        return Outputs(self._logits(batch, blocks, committed), dict(self._context.failures))

    def _following(self, index: int) -> MoeWeights | None:
        """The feed-forward part of the next layer, if that is a mixture of experts."""
        after = self.weights.layers[index + 1].ffn if index + 1 < len(self.weights.layers) else None
        return after if isinstance(after, MoeWeights) else None

    def _logits(self, batch: Batch, blocks: NDArray[np.float32], committed: int) -> NDArray[np.float32]:
        """Next-token logits of the wanted rows only: the head is the largest matrix of a small model."""
        chosen = np.ascontiguousarray(blocks[:, batch.logit_rows])
        normed = np.empty(chosen.shape[1:], dtype=np.float32)
        self._norm(chosen, committed, self.weights.output_mixing, self.weights.norm, normed)
        logits = np.empty((len(batch.logit_rows), self.config.vocab_size), dtype=np.float32)
        product(self._context, normed, [(self.weights.head, 0)], logits)
        return logits

    def _norm(
        self,
        blocks: NDArray[np.float32],
        committed: int,
        mixing: Mixing | None,
        norm: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> None:
        """A sub-layer's input: the running sum, mixed with the committed blocks where there are any, normalised."""
        eps = self.config.rms_norm_eps
        if mixing is None or committed == 0:
            rms_norm(blocks[committed], 0, self.config.hidden_size, norm, eps, out, 0)
        else:
            attn_res(blocks, committed, blocks[committed], True, mixing.score, eps, norm, eps, out)
