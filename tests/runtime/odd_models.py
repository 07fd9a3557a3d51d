"""Small models with shapes that no published one has."""

from dataclasses import replace

from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, ExpertType, TinyModel


def odd_shapes() -> dict[str, TinyModel]:
    """Shapes that nothing in a published model has, by what is odd about them; each is small."""
    small = replace(TINY_K3, layers=3, attention_layers=(2,), experts=8, experts_per_token=2, residual_block=2)
    linear = replace(TINY_LINEAR, layers=3, attention_layers=(3,), experts=8, experts_per_token=2)
    return {
        "three heads, widths off every multiple of 16": replace(
            small, hidden=104, kda_heads=3, kda_head_dim=24, decay_slots=3, heads=3, q_lora=20, kv_lora=40, nope_dim=20
        ),
        "a vocabulary off every multiple of 16, no tokenizer": replace(small, vocab=259),
        "head tied to the embedding": replace(linear, tied_head=True),
        "query without low rank, SiTU without its linear bound": replace(small, q_lora=None, situ_linear_beta=None),
        "no latent experts in K3": replace(small, expert_latent=None, expert_latent_norm=False, hidden=96),
        "plain bfloat16 experts in K3": replace(small, expert_type=ExpertType.BF16),
        "float32 everywhere": replace(linear, trunk_type="F32", expert_type=ExpertType.F32),
        "experts in groups": replace(linear, groups=4, kept_groups=2),
        "two dense layers first": replace(linear, first_dense=2),
        "no experts at all": replace(linear, experts=0),
        "no shared experts": replace(linear, shared_experts=0),
        "latent attention only": replace(linear, attention_layers=(1, 2, 3)),
        "KDA only": replace(linear, attention_layers=()),
    }
