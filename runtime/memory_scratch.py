"""How much working memory a step needs, from the model's shape and the number of rows that go through it together."""

from serai.runtime.memory_weights import padded_rows
from serai.runtime.models.config import LayerKind, ModelConfig


def scratch_floats_per_row(config: ModelConfig) -> dict[str, int]:
    """4-byte numbers a row of a step needs at once, by buffer.

    Layers take turns, so each buffer is as wide as its widest use. Not among them: the logits of a row, which belong
    to the session's state, and what each compute thread keeps for itself.
    """
    hidden, moe = config.hidden_size, config.moe
    blocks = -(-config.num_layers // config.attn_res_block_size) if config.attn_res_block_size else 0
    pairs = 0 if moe is None else moe.experts_per_token
    return {
        "residual_blocks": (1 + blocks) * hidden,  # the running sum lies behind the committed blocks
        "normed": hidden,
        "projected": max(_projected(config)),
        "wide": 2 * max(_wide(config)),
        "mixed": max(_mixed(config)),
        # Every chosen expert's output is kept until all are there: they are summed in ascending id (DESIGN §6d).
        "experts": 0 if moe is None else pairs * (moe.inner + moe.latent),
        "routes": 3 * pairs,  # the chosen expert, its weight, and its place among all pairs
    }


def scratch_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of working memory for steps of up to that many rows."""
    return 4 * (rows * sum(scratch_floats_per_row(config).values()) + _expert_list(config, rows))


def _expert_list(config: ModelConfig, rows: int) -> int:
    """Numbers that say which distinct experts a step visits, and where the pairs of each start."""
    if config.moe is None:
        return 0
    return 1 + 2 * min(rows * config.moe.experts_per_token, config.moe.experts)


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
        widths.append(_side_by_side(moe.experts, latent, moe.shared_inner, moe.shared_inner))
    if not all(config.layer_is_moe):
        widths.append(_side_by_side(config.dense_intermediate, config.dense_intermediate))
    return widths


def _wide(config: ModelConfig) -> list[int]:
    """Widths of what stands between two products: activations, and queries against latents."""
    widths = [config.dense_intermediate]
    if LayerKind.KDA in config.layer_kinds:
        widths.append(config.kda.width)
    if LayerKind.MLA in config.layer_kinds:
        widths.append(config.mla.heads * config.mla.latent_width)
    if config.moe is not None:
        widths.append(config.moe.shared_inner)
    return widths


def _mixed(config: ModelConfig) -> list[int]:
    """Widths of what a token mixer gives."""
    mla = config.mla
    widths = [config.hidden_size]
    if LayerKind.KDA in config.layer_kinds:
        widths.append(config.kda.width)
    if LayerKind.MLA in config.layer_kinds:
        widths.append(mla.heads * max(mla.query_dim, mla.kv_lora_rank, mla.v_dim))
    return widths


def _side_by_side(*pieces: int) -> int:
    return sum(padded_rows(piece) for piece in pieces)
