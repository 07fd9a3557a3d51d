"""Fewer routed experts a token than the model was trained with: a quality trade that is asked for, never taken.

The router scores all experts as ever and keeps the n best of them instead of the configuration's k (ties and expert
groups as in the model). What becomes of their weights is the configuration's own rule, for n as for k: with
`moe_renormalize` the n sigmoid scores are divided by their sum, so that what is left counts for the experts left out;
without it the others' share is missing. `routed_scaling_factor` is applied as it stands.

States made so are another function's: the fingerprint says `experts_per_token`, and none is taken for another's.
"""

from dataclasses import replace

from serai.runtime.errors import BadParameter
from serai.runtime.models.config import ModelConfig


def with_experts_per_token(config: ModelConfig, wanted: int | None) -> ModelConfig:
    """The configuration with `wanted` experts for each token, from 1 to the model's own number; None leaves it be.

    Memory, scratch and reads are planned from the result. `raw`, and so the hash that identifies the configuration,
    stays the file's. Raises `BadParameter`.
    """
    if wanted is None:
        return config
    if config.moe is None:
        raise BadParameter(f"experts_per_token is {wanted!r}, but this model has no routed experts; leave it out")
    most = config.moe.experts_per_token
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= most:
        raise BadParameter(
            f"experts_per_token is {wanted!r}, but must be a whole number from 1 to {most}, the model's own"
        )
    return replace(config, moe=replace(config.moe, experts_per_token=wanted))
