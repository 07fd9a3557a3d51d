"""The working memory of one step, made once for the largest step and reused by every layer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serai.kernels.kda import kda_scratch_floats
from serai.kernels.threads import threads
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.weights import KdaWeights, MlaWeights, ModelWeights, MoeWeights


@dataclass(frozen=True, slots=True)
class ScratchShape:
    """Widths, in numbers a row, of the buffers a step needs."""

    hidden: int
    blocks: int
    projected: int
    wide: int
    mixed: int
    pairs: int
    expert_inner: int
    expert_out: int
    experts: int
    kda_head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, weights: ModelWeights) -> "ScratchShape":
        """The widths this model needs: for each buffer the widest of its uses."""
        mla, moe = config.mla, config.moe
        projected = [0]
        for layer in weights.layers:
            projected.append(layer.attention.projections.width)
            ffn = layer.ffn
            projected.append(ffn.projections.width if isinstance(ffn, MoeWeights) else ffn.gate_up.width)
        attention = {type(layer.attention) for layer in weights.layers}
        wide = [config.dense_intermediate]
        mixed = [config.hidden_size]
        if KdaWeights in attention:
            wide.append(config.kda.width)
            mixed.append(config.kda.width)
        if MlaWeights in attention:
            wide.append(mla.heads * mla.latent_width)
            mixed.append(max(mla.heads * mla.query_dim, mla.heads * mla.kv_lora_rank, mla.heads * mla.v_dim))
        if moe is not None:
            wide.append(moe.shared_inner)
        size = config.attn_res_block_size
        return cls(
            hidden=config.hidden_size,
            blocks=1 + (-(-config.num_layers // size) if size else 0),
            projected=max(projected),
            wide=max(wide),
            mixed=max(mixed),
            pairs=0 if moe is None else moe.experts_per_token,
            expert_inner=0 if moe is None else moe.inner,
            expert_out=0 if moe is None else moe.latent,
            experts=0 if moe is None else moe.experts,
            kda_head_dim=config.kda.head_dim,
        )


class Scratch:
    """Flat buffers handed out as `[rows, width]` views, so that every product is contiguous."""

    def __init__(self, shape: ScratchShape, max_rows: int) -> None:
        pairs = max_rows * shape.pairs
        self.shape = shape
        self._floats = {
            name: np.empty(max_rows * width, dtype=np.float32)
            for name, width in (
                ("blocks", shape.blocks * shape.hidden),
                ("normed", shape.hidden),
                ("projected", shape.projected),
                ("wide", shape.wide),
                ("second", shape.wide),
                ("mixed", shape.mixed),
                ("inner", shape.pairs * shape.expert_inner),
                ("expert_out", shape.pairs * shape.expert_out),
                ("pick_weights", shape.pairs),
            )
        }
        self._picks = np.empty(pairs, dtype=np.int32)
        self.pairs = np.empty(pairs, dtype=np.int32)
        self.distinct = np.empty(min(pairs, shape.experts), dtype=np.int32)
        self.starts = np.empty(min(pairs, shape.experts) + 1, dtype=np.int32)
        self.kda = np.empty(kda_scratch_floats(shape.kda_head_dim, threads()), dtype=np.float32)

    @property
    def bytes(self) -> int:
        """Bytes of all buffers together."""
        arrays = [*self._floats.values(), self._picks, self.pairs, self.distinct, self.starts, self.kda]
        return sum(array.nbytes for array in arrays)

    def view(self, name: str, rows: int, width: int) -> NDArray[np.float32]:
        """Buffer `name` as float32 `[rows, width]`; what it holds is unknown."""
        return self._floats[name][: rows * width].reshape(rows, width)

    def blocks(self, rows: int) -> NDArray[np.float32]:
        """The residual blocks, float32 `[blocks, rows, hidden]`; the running sum lies behind the committed ones."""
        shape = self.shape
        return self._floats["blocks"][: shape.blocks * rows * shape.hidden].reshape(shape.blocks, rows, shape.hidden)

    def picks(self, rows: int) -> NDArray[np.int32]:
        """The experts each row is sent to, int32 `[rows, experts_per_token]`."""
        return self._picks[: rows * self.shape.pairs].reshape(rows, self.shape.pairs)
