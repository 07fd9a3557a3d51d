"""How wide the working memory of a step must be, from the configuration alone: one statement for plan and engine."""

from dataclasses import dataclass

from serai.checkpoints.snapshot import LatentType
from serai.runtime.memory.weights import padded_rows
from serai.runtime.models.config import LayerKind, ModelConfig
from serai.runtime.models.layout import state_layout
from serai.runtime.models.trunk import GROUP
from serai.runtime.state import Part, part_bytes

FOUND = 1
"""Numbers that hold how many experts are visited."""


@dataclass(frozen=True, slots=True)
class ScratchShape:
    """Widths, in 4-byte numbers a row, of the buffers a step needs.

    Layers take turns, so each buffer is as wide as its widest use; `inputs` is the widest input of a projection, for a
    quantised trunk; `state` counts the numbers of a session's fixed state, not of a row. Not among them: the logits of
    a row, which belong to the session's state, and what each compute thread keeps for itself.
    """

    hidden: int
    blocks: int
    projected: int
    wide: int
    second: int
    mixed: int
    picks: int
    expert_inner: int
    expert_out: int
    experts: int
    inputs: int
    shared_inner: int
    state: int

    @classmethod
    def of(cls, config: ModelConfig) -> "ScratchShape":
        """The widths this model needs."""
        moe = config.moe
        size = config.attn_res_block_size
        return cls(
            hidden=config.hidden_size,
            blocks=1 + (-(-config.num_layers // size) if size else 0),  # the running sum lies behind the committed ones
            projected=max(_projected(config)),
            wide=max(_wide(config)),
            second=max(_second(config), default=0),
            mixed=max(_mixed(config)),
            picks=0 if moe is None else moe.experts_per_token,
            expert_inner=0 if moe is None else moe.inner,
            expert_out=0 if moe is None else moe.latent,
            experts=0 if moe is None else moe.experts,
            inputs=max(_inputs(config)) // GROUP * GROUP,
            shared_inner=0 if moe is None else moe.shared_inner,
            state=part_bytes(state_layout(config, LatentType.FLOAT32), Part.FIXED) // 4,
        )

    def bytes_for(self, rows: int) -> int:
        """Bytes of working memory for steps of up to that many rows."""
        # Every chosen expert's output is kept until all are there: they are summed in ascending id (contract, d).
        # A pick is an expert, its weight, and its place among all pairs.
        experts = self.picks * (self.expert_inner + self.expert_out + 3)
        floats = self.hidden * (self.blocks + 1) + self.projected + self.wide + self.second + self.mixed + experts
        floats += self.experts  # the router's scores
        # Of a visited expert its id and, in two words, its address.
        return 4 * (rows * floats + 3 * self.distinct(rows) + self.starts(rows) + FOUND)

    def wide_bytes(self, rows: int) -> int:
        """Bytes that passes of up to that many rows need beside the working memory of ordinary steps."""
        # What outlives a tile: blocks, what the experts read and their sum, the shared ones' activations, picks and
        # their weights, and each expert's pairs. Beside it the state of one session between two tiles.
        floats = self.hidden * self.blocks + 2 * self.expert_out + self.shared_inner + 3 * self.picks
        return 4 * (rows * floats + self.distinct(rows) + self.starts(rows) + FOUND + self.state)

    def q8_activation_bytes(self, rows: int) -> int:
        """Bytes of the 8-bit activations that a quantised trunk needs: codes, and three numbers per 32 of them."""
        return rows * (self.inputs + self.inputs // GROUP * 12)

    def distinct(self, rows: int) -> int:
        """The most different experts that a step can visit."""
        return min(rows * self.picks, self.experts)

    def starts(self, rows: int) -> int:
        """Numbers that say where the pairs of each visited expert begin."""
        return self.distinct(rows) + 1 if self.experts else 0


def _projected(config: ModelConfig) -> list[int]:
    """Widths of the products that several projections of one input are computed as."""
    kda, mla, moe = config.kda, config.mla, config.moe
    widths = []
    if LayerKind.KDA in config.layer_kinds:
        gate = kda.width if kda.full_rank_gate else kda.head_dim
        widths.append(_side_by_side(kda.width, kda.width, kda.width, gate, kda.head_dim, kda.heads))
    if LayerKind.MLA in config.layer_kinds:
        queries = mla.heads * mla.query_dim if mla.q_lora_rank is None else mla.q_lora_rank
        widths.append(_side_by_side(queries, mla.latent_width, mla.heads * mla.v_dim if mla.output_gate else 0))
    if moe is not None:
        latent = moe.latent if moe.has_latent else 0
        widths.append(_side_by_side(latent, moe.shared_inner, moe.shared_inner))
    if not all(config.layer_is_moe):
        widths.append(_side_by_side(config.dense_intermediate, config.dense_intermediate))
    return widths


def _wide(config: ModelConfig) -> list[int]:
    """Inner activations, KDA's decay, and MLA's queries before and after they are taken to latent space."""
    widths = [config.dense_intermediate]
    if LayerKind.KDA in config.layer_kinds:
        widths.append(config.kda.width)
    if LayerKind.MLA in config.layer_kinds:
        widths += [config.mla.heads * config.mla.latent_width, config.mla.q_lora_rank or 0]
    if config.moe is not None:
        widths.append(config.moe.shared_inner)
    return widths


def _second(config: ModelConfig) -> list[int]:
    """KDA's low-rank output gate, and MLA's values."""
    widths = []
    if LayerKind.KDA in config.layer_kinds and not config.kda.full_rank_gate:
        widths.append(config.kda.width)
    if LayerKind.MLA in config.layer_kinds:
        widths.append(config.mla.heads * config.mla.v_dim)
    return widths


def _mixed(config: ModelConfig) -> list[int]:
    """What a token mixer gives, MLA's queries, and the sum of the routed experts."""
    mla = config.mla
    widths = [0]
    if LayerKind.KDA in config.layer_kinds:
        widths.append(config.kda.width)
    if LayerKind.MLA in config.layer_kinds:
        widths.append(mla.heads * max(mla.query_dim, mla.kv_lora_rank))
    if config.moe is not None:
        widths.append(config.moe.latent)
    return widths


def _inputs(config: ModelConfig) -> list[int]:
    """Columns of the matrices that can be held quantised."""
    mla, moe = config.mla, config.moe
    widths = [config.hidden_size, config.dense_intermediate]
    if LayerKind.KDA in config.layer_kinds:
        widths.append(config.kda.width)
    if LayerKind.MLA in config.layer_kinds:
        widths += [mla.q_lora_rank or 0, mla.heads * mla.v_dim]
    if moe is not None:
        widths += [moe.latent, moe.shared_inner]
    return widths


def _side_by_side(*pieces: int) -> int:
    return sum(padded_rows(piece) for piece in pieces)
