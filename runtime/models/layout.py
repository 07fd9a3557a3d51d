"""The shapes of a session's state, from a model's configuration."""

from dataclasses import replace

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.kernels.kda_panels import PANEL, panels_of
from serai.runtime.errors import BadParameter
from serai.runtime.models.config import ModelConfig

LEAST_PAGE_TOKENS, MOST_PAGE_TOKENS = 64, 1_024
"""Tokens in a latent page. A forked session copies at most one partly filled page, so small is cheap; 64 keeps a
K3 page (24 layers) at 3.5 MB in float32, large enough to read at full speed. No bits depend on it."""

PAGE_NUMBERS = 1 << 18
"""How many numbers a page of a small model may have. Each is a file of a stored state, at about a millisecond to make,
name and sync and half of one to read: nano's state of 32,768 tokens took 720 ms out and 260 ms back in files of 24 KB.
"""


def latent_type(asked: str | LatentType | None, *, fast: bool) -> LatentType:
    """How latents are kept: as asked, or as the precision has them. Raises `BadParameter` for a form there is not."""
    if asked is None:
        return LatentType.BFLOAT16 if fast else LatentType.FLOAT32
    try:
        return LatentType(asked)
    except ValueError:
        forms = ", ".join(repr(kind.value) for kind in LatentType)
        raise BadParameter(f"latents is one of {forms}, or left out for the precision's own, not {asked!r}") from None


def page_tokens_of(config: ModelConfig) -> int:
    """Tokens in a latent page, a power of two: as many as `PAGE_NUMBERS` allow, within bounds."""
    tokens = PAGE_NUMBERS // max(1, config.mla_layers * config.mla.latent_width)
    return max(LEAST_PAGE_TOKENS, min(1 << (max(1, tokens).bit_length() - 1), MOST_PAGE_TOKENS))


def state_layout(config: ModelConfig, latents: LatentType) -> StateLayout:
    """The state of one session: KDA in panels (`kernels/kda_panels.py`), tails oldest tap first, latents in pages."""
    kda, mla = config.kda, config.mla
    return StateLayout(
        kda_shape=(config.kda_layers, kda.heads * panels_of(kda.head_dim), kda.head_dim, PANEL),
        conv_shape=(config.kda_layers, 3, kda.conv_kernel - 1, kda.width),
        mla_layers=config.mla_layers,
        latent_width=mla.latent_width,
        latent_type=latents,
        page_tokens=page_tokens_of(config),
        vocab=config.vocab_size,
    )


def holds_the_same_numbers(stored: StateLayout, ours: StateLayout) -> bool:
    """Whether states of the two layouts are of the same sizes and differ at most in where their numbers lie.

    Builds have differed in that, models don't: in the tokens of a page, and in a KDA head's matrix, which was stored by
    its rows before it was in panels. Any other shape is another model's.
    """
    if stored.kda_shape not in (ours.kda_shape, _kda_shape_by_rows(ours)):
        return False
    return replace(stored, page_tokens=ours.page_tokens, kda_shape=ours.kda_shape) == ours


def _kda_shape_by_rows(ours: StateLayout) -> tuple[int, int, int, int]:
    """`(layers, heads, head_dim, head_dim)`; where a head is one whole panel, that is the same shape and order."""
    layers, panels, head_dim, _ = ours.kda_shape
    return layers, panels // panels_of(head_dim), head_dim, head_dim
