"""Guesses of the experts that the next layer will want, so that they are read before it comes.

The next layer's router is asked with what is known of its input. Guesses change no result: the disk is given them
when no step waits for anything else.

On K3-48B with random weights, eight sessions, 90 % of the guesses that were read were wanted; of those made from the
embedding for the first layer 70 %. The disk is idle for 4 % of a step then, and was for 10 % when guesses came only
once a layer was done. That is why sessions don't take turns in two groups, one computing while the other's experts are
read: apart they visit 54 experts a layer, together 45.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serai.kernels.moe import combine
from serai.runtime.models.backbone import Backbone
from serai.runtime.models.layers import Context
from serai.runtime.models.mixture import add_experts, route_rows
from serai.runtime.models.weights import MoeWeights

MOST_ROWS = 64
"""More rows want nearly every expert of the next layer, and the layer itself will ask for them soon enough."""

PARTS = 3
"""A guess needs room beside the step's own rows for as many again, twice."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """The guesses for layer `following`, made in layer `layer` (-1: before the first), from the residual `blocks`."""

    backbone: Backbone
    context: Context
    layer: int
    following: int
    blocks: NDArray[np.float32]

    @classmethod
    def of(cls, backbone: Backbone, context: Context, layer: int, blocks: NDArray[np.float32]) -> "LookAhead | None":
        """None where there is nothing to guess, or too many rows to do it for."""
        if not context.looks_ahead or blocks.shape[1] > min(MOST_ROWS, context.scratch.rows // PARTS):
            return None
        following = backbone.following(layer)
        return None if following is None else cls(backbone, context, layer, following, blocks)

    def before_the_last(
        self,
        weights: MoeWeights,
        each: NDArray[np.float32],
        pick_weights: NDArray[np.float32],
        shared: NDArray[np.float32] | None,
    ) -> None:
        """Guess with what `each` expert of this layer gave so far, zeros for the rest: as in `mixture.visited_experts`.

        The last experts are on their way then, and without a guess the disk would have nothing to do until they are
        computed with.
        """
        scratch, rows = self.context.scratch, self.blocks.shape[1]
        running = self.backbone.running(self.layer, self.blocks)
        kept = scratch.spare("normed", rows, running.shape[1], 2)
        kept[:] = running
        routed = scratch.view("mixed", rows, each.shape[1])
        combine(each, pick_weights, routed)
        add_experts(self.context, weights, routed, shared, running)
        self.guess()
        running[:] = kept

    def guess(self) -> None:
        """Guess as if nothing were added, up to there, to what the blocks hold now."""
        moe, scratch, rows = self.context.moe, self.context.scratch, self.blocks.shape[1]
        ffn = self.backbone.weights.layers[self.following].ffn
        if not isinstance(ffn, MoeWeights):
            raise AssertionError(f"layer {self.following} has routed experts")
        normed = scratch.spare("normed", rows, self.blocks.shape[2])
        self.backbone.skip_to(self.following, self.layer, self.blocks, normed)
        scores = scratch.spare("scores", rows, moe.experts)
        picks, weights = scratch.spare_picks(rows), scratch.spare("pick_weights", rows, moe.experts_per_token)
        route_rows(self.context, ffn, normed, scores, picks, weights)
        # The surest first: those that count for most, and for most rows.
        total = np.bincount(picks.reshape(-1), np.abs(weights).reshape(-1), minlength=moe.experts)
        ids = np.unique(picks)
        self.context.experts.guess(self.following, ids[np.argsort(-total[ids], kind="stable")])
