"""The shapes of a session's state, from a model's configuration."""

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.runtime.models.config import ModelConfig

PAGE_TOKENS = 64
"""Tokens in a latent page. A forked session copies at most one partly filled page, so small is cheap; 64 keeps a
K3 page (24 layers) at 3.5 MB in float32, large enough to read at full speed. No bits depend on it."""


def state_layout(config: ModelConfig, latents: LatentType, *, page_tokens: int = PAGE_TOKENS) -> StateLayout:
    """The state of one session: KDA key by value, tails oldest tap first, latents in pages over all MLA layers."""
    kda, mla = config.kda, config.mla
    return StateLayout(
        kda_shape=(config.kda_layers, kda.heads, kda.head_dim, kda.head_dim),
        conv_shape=(config.kda_layers, 3, kda.conv_kernel - 1, kda.width),
        mla_layers=config.mla_layers,
        latent_width=mla.latent_width,
        latent_type=latents,
        page_tokens=page_tokens,
        vocab=config.vocab_size,
    )
