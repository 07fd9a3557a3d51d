"""What a token of context costs under other kinds of attention, for comparison with a hybrid model.

Keys and values cost `2 · layers · kv_heads · head_dim · bytes a value` for a token (multi-head, grouped and
multi-query attention); latent attention costs `layers · (kv_lora_rank + rope_dim) · bytes a value`.
"""

from dataclasses import dataclass

from serai.runtime.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Memory of one session: `fixed_bytes` whatever the context, and `token_bytes` for each token of it."""

    name: str
    token_bytes: int
    fixed_bytes: int = 0

    def session_bytes(self, tokens: int) -> int:
        return self.fixed_bytes + tokens * self.token_bytes


def kv_token_bytes(*, layers: int, kv_heads: int, head_dim: int, value_bytes: int) -> int:
    """Cached keys and values of one token."""
    return 2 * layers * kv_heads * head_dim * value_bytes


def latent_token_bytes(*, layers: int, latent_width: int, value_bytes: int) -> int:
    """Cached latents of one token."""
    return layers * latent_width * value_bytes


PUBLISHED = (
    AttentionCost("Llama-2-7B (multi-head, fp16)", kv_token_bytes(layers=32, kv_heads=32, head_dim=128, value_bytes=2)),
    AttentionCost(
        "Qwen3-30B-A3B (grouped-query, bf16)", kv_token_bytes(layers=48, kv_heads=4, head_dim=128, value_bytes=2)
    ),
    AttentionCost(
        "the same with 32 key heads (multi-head)", kv_token_bytes(layers=48, kv_heads=32, head_dim=128, value_bytes=2)
    ),
    AttentionCost(
        "DeepSeek-V3, Kimi K2 (latent, bf16)", latent_token_bytes(layers=61, latent_width=512 + 64, value_bytes=2)
    ),
)
"""Models of the other attention families, from their published shapes."""


def alternatives(config: ModelConfig, value_bytes: int) -> tuple[AttentionCost, ...]:
    """The same model four ways: as it is, with latent attention in every layer, with its latents expanded, and with
    full attention in every layer: expanded latents, and for a KDA layer the keys and values of as many heads."""
    mla, kda = config.mla, config.kda
    kda_floats = config.kda_layers * kda.heads * kda.head_dim**2
    expanded = config.mla_layers * mla.heads * (mla.query_dim + mla.v_dim) * value_bytes
    full = kv_token_bytes(layers=config.kda_layers, kv_heads=kda.heads, head_dim=kda.head_dim, value_bytes=value_bytes)
    return (
        AttentionCost(
            f"this model ({config.mla_layers} MLA + {config.kda_layers} KDA layers)",
            latent_token_bytes(layers=config.mla_layers, latent_width=mla.latent_width, value_bytes=value_bytes),
            kda_floats * value_bytes,
        ),
        AttentionCost(
            f"all {config.num_layers} layers latent attention",
            latent_token_bytes(layers=config.num_layers, latent_width=mla.latent_width, value_bytes=value_bytes),
        ),
        AttentionCost(f"keys and values of its {config.mla_layers} MLA layers, expanded", expanded),
        AttentionCost(f"all {config.num_layers} layers full attention", expanded + full),
    )
