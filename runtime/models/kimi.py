"""The forward pass of Kimi-Linear and Kimi K3, written as model-spec §3: a batch of rows in, next-token logits out.

Every layer works on all rows at once, whichever session they belong to; only KDA's recurrence and MLA's attention look
at which rows belong together. Nothing here decides anything: it is the formulas, in order.
"""

from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import StateLayout
from serai.kernels.matmul import gather_rows
from serai.runtime.experts.access import Experts, Wait
from serai.runtime.models.backbone import Backbone, Floats
from serai.runtime.models.batch import Batch, Outputs
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.layers import Context, dense_layer
from serai.runtime.models.look_ahead import LookAhead
from serai.runtime.models.mixture import resident_experts, send_rows, visited_experts
from serai.runtime.models.replay import Replays, doing
from serai.runtime.models.scratch import Scratch
from serai.runtime.models.trunk import Trunk
from serai.runtime.models.weights import ModelWeights, MoeWeights
from serai.runtime.models.wide_pass import WidePass

LAYERS_TOGETHER = 4
"""Layers between two pauses of few rows, where no experts have to be visited. After each pause Python finds its data
gone from the caches, driven out by weights: 50 us, of 2,600 that a layer of `bench model` takes."""

FEW_ROWS = 8
"""Of more rows a layer takes long: whoever waits for a pause should not wait for several."""


class KimiModel:
    """A loaded model with the scratch of one step; `forward` is the only thing it does.

    A step of more than `max_rows` rows, up to `wide_rows`, is a wide one (`WidePass`). While it pauses another step may
    be run: it needs the scratch between its pauses only.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        experts: Experts | None,
        layout: StateLayout,
        *,
        max_rows: int,
        wide_rows: int = 0,
        fast: bool,
        trunk: Trunk = Trunk.AS_STORED,
        looks_ahead: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.experts = experts
        self.layout = layout
        self.max_rows = max_rows
        self.wide_rows = wide_rows
        self.scratch = Scratch(config, max_rows, fast=fast, trunk=trunk)
        self._context = Context(config, layout, self.scratch, experts, fast, looks_ahead)
        self._backbone = Backbone(config, weights)
        self.replays = Replays()
        self._wide: WidePass | None = None
        if wide_rows > max_rows:
            context = Context(config, layout, self.scratch, experts, fast, looks_ahead)
            self._wide = WidePass(self._backbone, context, wide_rows, max_rows)

    @property
    def bytes(self) -> int:
        """Bytes of trunk, experts and scratch."""
        return self.weights.bytes + self.expert_bytes + self.scratch_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the working memory of steps, wide ones too."""
        return self.scratch.bytes + (0 if self._wide is None else self._wide.bytes)

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
        if batch.rows > self.max_rows:
            if self._wide is None:
                raise ValueError(f"{batch.rows} rows are more than the {self.max_rows} this model has scratch for")
            return (yield from self._wide.forward(batch))
        self._context.failures.clear()
        blocks = self.scratch.blocks(batch.rows)
        normed = self.scratch.view("normed", batch.rows, self.config.hidden_size)
        gather_rows(self.weights.embedding, batch.tokens, blocks[0])
        ahead = LookAhead.of(self._backbone, self._context, -1, blocks)
        if ahead is not None:
            ahead.guess()
        replay = self.replays.of(batch)
        past = 0
        while past < len(self.weights.layers):
            first, past = past, self._pause_after(past, batch.rows)
            last, do = past - 1, doing(replay, first)
            running = do("layers", self._layers, first, past, batch, blocks, normed)
            ahead = LookAhead.of(self._backbone, self._context, last, blocks)
            if (moe := self._visits(last)) is not None:
                early = None if ahead is None else ahead.before_the_last
                yield from visited_experts(self._context, moe, last, normed, running, early, do)
            if ahead is not None:
                ahead.guess()
            yield None
        # Of the wanted rows only: the head is the largest matrix of a small model.
        chosen = np.ascontiguousarray(blocks[:, batch.logit_rows])
        return Outputs(self._backbone.logits(self._context, chosen), dict(self._context.failures))

    def _addresses(self, index: int) -> NDArray[np.int64] | None:
        """Where a layer's experts lie, if all of them do."""
        return self._context.experts.addresses(index)

    def _visits(self, index: int) -> MoeWeights | None:
        """Layer `index`'s experts, if they have to be visited."""
        ffn = self.weights.layers[index].ffn
        return ffn if isinstance(ffn, MoeWeights) and self._addresses(index) is None else None

    def _pause_after(self, first: int, rows: int) -> int:
        """Before which layer a pass that is at layer `first` pauses next."""
        past = first + 1
        if rows <= FEW_ROWS and not self._context.looks_ahead:
            end = min(first + LAYERS_TOGETHER, len(self.weights.layers))
            while past < end and self._visits(past - 1) is None:
                past += 1
        return past

    def _layers(self, first: int, past: int, batch: Batch, blocks: Floats, normed: Floats) -> Floats:
        """Layers from `first` to before `past`; gives the running sum of the last one."""
        for index in range(first, past):
            running = self._layer(index, batch, blocks, normed)
        return running

    def _layer(self, index: int, batch: Batch, blocks: Floats, normed: Floats) -> Floats:
        """Layer `index`, or if its experts have to be visited, all before them; gives the running sum."""
        ffn = self.weights.layers[index].ffn
        running = self._backbone.attention(self._context, index, batch, blocks, normed)
        if not isinstance(ffn, MoeWeights):
            dense_layer(self._context, ffn, normed, running)
            return running
        send_rows(self._context, ffn, normed)
        addresses = self._addresses(index)
        if addresses is not None:
            resident_experts(self._context, ffn, addresses, normed, running)
        return running
