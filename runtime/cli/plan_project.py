"""`serai plan --project`: tokens a second of a model, and of Kimi K3, from this machine's disk and processor."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from serai.runtime.cli.output import bytes_text, pairs, table

if TYPE_CHECKING:
    from serai.checkpoints.snapshot import LatentType
    from serai.runtime.memory.plan import MemoryPlan
    from serai.runtime.memory.projection import Quantities, Speeds, Step
    from serai.runtime.models.config import ModelConfig
    from serai.runtime.models.trunk import Trunk

GIVEN, K3_NAME = "this model", "Kimi K3"


@dataclass(frozen=True, slots=True)
class Projected:
    """One model's numbers and rows."""

    name: str
    numbers: "Quantities"
    steps: "list[Step]"


@dataclass(frozen=True, slots=True)
class Projections:
    """What `--project` prints."""

    speeds: "Speeds"
    budget_bytes: int
    models: tuple[Projected, ...]

    def to_json(self) -> dict[str, object]:
        from serai.runtime.memory.projection import ASSUMPTIONS, FORMULA

        return {
            "speeds": asdict(self.speeds),
            "formula": list(FORMULA),
            "assumptions": list(ASSUMPTIONS),
            "models": [
                {"model": one.name, **asdict(one.numbers), "steps": [step.to_json() for step in one.steps]}
                for one in self.models
            ],
        }

    def tables(self) -> list[RenderableType]:
        from serai.runtime.memory.projection import ASSUMPTIONS, FORMULA

        shown: list[RenderableType] = [_speeds_table(self.speeds), Text("\nThe formula, for n rows", style="bold")]
        shown += [Text(f"  {line}") for line in FORMULA]
        for one in self.models:
            shown += [_numbers_table(one), _steps_table(one, self.budget_bytes)]
        return [*shown, Text("\nTaken for granted", style="bold"), *(Text(f"- {line}") for line in ASSUMPTIONS)]


def measured_speeds(
    folder: Path, disk_rate: str | None, record_bytes: int, trunk: "Trunk", *, fast: bool, tell: Callable[[str], None]
) -> "Speeds":
    """Measure the processor, and the disk unless its rate is given. Raises `BadParameter`."""
    import serai.runtime.models.kimi  # noqa: F401  # declares every kernel
    from serai.kernels import compile as kernels
    from serai.runtime.bench.speeds import measure_speeds
    from serai.runtime.experts.disk_speed import K3_RECORD_BYTES, measure_disk
    from serai.runtime.memory.byte_sizes import parse_bytes

    if disk_rate is None:
        disk = measure_disk(folder, record_bytes=max(record_bytes, K3_RECORD_BYTES), tell=tell).random.bytes_per_s
    else:
        disk = float(parse_bytes(disk_rate, name="disk_rate"))
    kernels.warm(lambda step: tell("compiling kernels") if step.done == 1 else None)
    return measure_speeds(disk, trunk, fast=fast, tell=tell)


def projections(
    config: "ModelConfig",
    plan: "MemoryPlan",
    speeds: "Speeds",
    budget_bytes: int,
    latents: "LatentType",
    trunk: "Trunk",
    *,
    fast: bool,
) -> Projections:
    """The model's rows and full K3's, in the same precision and context; one of them when it is K3."""
    from serai.runtime.bench.k3 import K3
    from serai.runtime.memory.plan import plan_memory
    from serai.runtime.memory.projection import project, quantities
    from serai.runtime.models.config import parse_config

    k3 = parse_config(K3.config())
    k3_plan = plan_memory(k3, context_tokens=plan.context_tokens, trunk=trunk, fast=fast)
    models = [(GIVEN, config, plan), (K3_NAME, k3, k3_plan)]
    if quantities(config, plan) == quantities(k3, k3_plan):
        models = models[1:]
    return Projections(
        speeds,
        budget_bytes,
        tuple(
            Projected(name, quantities(one, planned), project(one, planned, speeds, budget_bytes, latents))
            for name, one, planned in models
        ),
    )


def _speeds_table(speeds: "Speeds") -> Table:
    return pairs(
        [
            ("disk_rate", f"{bytes_text(int(speeds.disk_bytes))} a second"),
            ("trunk_rate", f"{bytes_text(int(speeds.trunk_bytes))} of weights a second, one row"),
            ("expert_rate", f"{bytes_text(int(speeds.expert_bytes))} of weights a second, one row"),
            ("product_rate", f"{speeds.product_operations / 1e9:,.0f} GFLOP a second, many rows"),
            ("state_rate", f"{bytes_text(int(speeds.state_bytes))} of states a second, read and written"),
            ("attention_rate", f"{speeds.attention_operations / 1e9:,.0f} GFLOP a second"),
        ],
        title="Measured here",
    )


def _numbers_table(one: Projected) -> Table:
    numbers = one.numbers
    return pairs(
        [
            ("L, E, k", f"{numbers.layers} layers of {numbers.experts} experts, {numbers.per_token} a token"),
            ("expert_bytes", f"{numbers.expert_bytes:,}, {numbers.expert_weights:,} weights"),
            ("trunk_bytes", f"{numbers.trunk_bytes:,} (no embedding), {numbers.trunk_weights:,} weights"),
            ("state_bytes", f"{numbers.state_bytes:,}"),
            ("context", f"{numbers.context_tokens:,} tokens"),
            ("attention_operations", f"{numbers.attention_operations:,} for a row and a cached token"),
        ],
        title=f"\n{one.name[0].upper()}{one.name[1:]}",
    )


def _steps_table(one: Projected, budget_bytes: int) -> Table:
    """A column for each number of rows, a line for each term of the formula."""
    steps = one.steps
    shown = table("n", *(step.what for step in steps))

    def line(name: str, values: Callable[["Step"], str]) -> None:
        shown.add_row(name, *(values(step) for step in steps))

    line("memory", lambda step: bytes_text(step.memory_bytes))
    if any(step.memory_bytes > budget_bytes for step in steps):
        line("  more than the budget", lambda step: "yes" if step.memory_bytes > budget_bytes else "no")
    line("slots", lambda step: f"{step.slots:,}")
    line("distinct", lambda step: f"{step.distinct:,.0f}")
    line("  of routed (sharing)", lambda step: f"{step.sharing:.2f}")
    line("hit", lambda step: f"{step.hit:.3f}")
    line("read", lambda step: bytes_text(int(step.read_bytes)))
    for name in ("disk", "weights", "products", "states", "latents", "step"):
        line(name, lambda step, name=name: f"{getattr(step, name + '_s'):.3g} s")  # type: ignore[misc]
    line("tok/s", lambda step: f"{step.tokens_per_s:.3g}")
    return shown
