"""How much working memory a step needs, from the model's shape and the number of rows that go through it together."""

from serai.runtime.models.config import ModelConfig

QUANTISED_GROUP = 32
"""Activations that share a scale when `fast` quantises them to 8 bits."""


def scratch_floats_per_row(config: ModelConfig) -> dict[str, int]:
    """float32 numbers a row of a step needs at once, by what for. Layers take turns, so the larger kind counts.

    The next-token logits are not among them: they are written straight into the session's state.
    """
    hidden = config.hidden_size
    blocks = -(-config.num_layers // config.attn_res_block_size) if config.attn_res_block_size else 0
    return {
        "stream": 4 * hidden,  # the running value, its prefix sum, a normalised input, a branch's output
        "residual_blocks": blocks * hidden,
        "mixer": max(_kda_floats(config), _mla_floats(config)),
        "feed_forward": max(2 * config.dense_intermediate, _moe_floats(config)),
    }


def scratch_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of working memory for a step of that many rows, in either precision."""
    widest = _widest_input(config)
    quantised = widest + 4 * -(-widest // QUANTISED_GROUP)
    return rows * (4 * sum(scratch_floats_per_row(config).values()) + quantised)


def _kda_floats(config: ModelConfig) -> int:
    if not config.kda_layers:
        return 0
    kda = config.kda
    # q, k, v, decay, output and its gate; the two low-rank bottlenecks; beta.
    return 6 * kda.width + 2 * kda.head_dim + kda.heads


def _mla_floats(config: ModelConfig) -> int:
    if not config.mla_layers:
        return 0
    mla = config.mla
    queries = mla.heads * mla.query_dim + (mla.q_lora_rank or 0)
    absorbed = mla.heads * (mla.latent_width + mla.kv_lora_rank)  # the query against latents, and their mix
    outputs = mla.heads * mla.v_dim * (2 if mla.output_gate else 1)
    return queries + mla.latent_width + absorbed + outputs


def _moe_floats(config: ModelConfig) -> int:
    moe = config.moe
    if moe is None:
        return 0
    # Every chosen expert's output is kept until all are there: they are summed in ascending id (DESIGN §6d).
    routed = moe.experts_per_token * (2 + 2 * moe.inner + moe.latent)
    return moe.experts + moe.latent + routed + 2 * moe.shared_inner


def _widest_input(config: ModelConfig) -> int:
    """The longest vector that any matrix is multiplied with."""
    widths = [config.hidden_size, config.dense_intermediate, config.kda.width, config.mla.heads * config.mla.v_dim]
    if config.moe is not None:
        widths += [config.moe.inner, config.moe.latent, config.moe.shared_inner]
    return max(widths)
