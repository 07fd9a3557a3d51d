"""This machine's rates in a second or two each, in Kimi K3's shapes: what `serai plan --project` extrapolates from."""

from collections.abc import Callable

from serai.kernels.matrix import Format
from serai.kernels.threads import parallel_region
from serai.runtime.bench.kernel_cases import (
    HEADS,
    HIDDEN,
    LATENT,
    Attention,
    Case,
    KdaLayers,
    exact_product,
    fast_product,
    weights,
)
from serai.runtime.bench.kernels import median_s
from serai.runtime.memory.projection import Speeds
from serai.runtime.models.trunk import Trunk

RUNS = 3
WEIGHT_BYTES = 256 << 20
"""Larger than what processors cache."""

MANY_ROWS = 256
KDA_LAYERS = 12
CONTEXT = 8_192


def measure_speeds(
    disk_bytes: float,
    trunk: Trunk,
    *,
    fast: bool,
    tell: Callable[[str], None] = lambda _: None,
    weight_bytes: int = WEIGHT_BYTES,
) -> Speeds:
    """Time the kernels that a step is made of, in the precision and trunk given; `disk_bytes` is passed on.

    BF16 weights meet float32 activations in either precision; so does everything in `exact`.
    """

    def rate(case: Case, amount: int) -> float:
        tell(f"timing {case.name}")
        return amount / median_s(case.run, RUNS)

    quantised = fast_product if fast else exact_product
    held = {Trunk.AS_STORED: Format.BF16, Trunk.Q8: Format.Q8, Trunk.Q4: Format.MXFP4}[trunk]
    with parallel_region():
        trunk_product = exact_product if held is Format.BF16 else quantised
        trunk_case = trunk_product(f"{held.name} weights, 1 row", weights(held, weight_bytes, HIDDEN), 1)
        trunk_rate = rate(trunk_case, trunk_case.nbytes)
        del trunk_case
        expert_case = quantised("MXFP4 weights, 1 row", weights(Format.MXFP4, weight_bytes, LATENT), 1)
        expert_rate = rate(expert_case, expert_case.nbytes)
        del expert_case
        many = quantised(f"MXFP4 weights, {MANY_ROWS} rows", weights(Format.MXFP4, 12 << 20, LATENT), MANY_ROWS)
        product_rate = rate(many, many.operations)
        kda = KdaLayers(KDA_LAYERS, HEADS, 1)
        state_rate = rate(Case("KDA states", kda.step_all), kda.nbytes)
        attention = Attention(CONTEXT).case(f"attention over {CONTEXT:,} tokens")
        attention_rate = rate(attention, attention.operations)
    return Speeds(disk_bytes, trunk_rate, expert_rate, product_rate, state_rate, attention_rate)
