"""What a bench found: claims, each with its target and how it was measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from serai.checkpoints.errors import SeraiError
from serai.runtime.checks.machine import machine


class BenchFailed(SeraiError):
    """Something that was to be measured did not happen; the sentence says what it did instead."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure. `target` is None for a figure that promises nothing; `holds` is None when that was not measured or
    there is no target, and `detail` says how it was measured, or why not."""

    name: str
    value: float | None
    unit: str
    target: str | None
    holds: bool | None
    detail: str

    @classmethod
    def below(cls, name: str, value: float, unit: str, limit: float, detail: str) -> "Claim":
        """A figure that is to be under a limit."""
        return cls(name, value, unit, f"< {limit:g}", value < limit, detail)

    @classmethod
    def at_least(cls, name: str, value: float, unit: str, limit: float, detail: str) -> "Claim":
        """A figure that is to reach a limit."""
        return cls(name, value, unit, f">= {limit:g}", value >= limit, detail)

    @classmethod
    def at_most(cls, name: str, value: float, unit: str, limit: float, detail: str) -> "Claim":
        """A figure that is not to exceed a limit."""
        return cls(name, value, unit, f"<= {limit:g}", value <= limit, detail)

    @classmethod
    def measured(cls, name: str, value: float, unit: str, detail: str) -> "Claim":
        """A figure without a target."""
        return cls(name, value, unit, None, None, detail)


@dataclass(frozen=True, slots=True)
class Report:
    """A bench's result: its claims, and the rows they were drawn from."""

    bench: str
    claims: tuple[Claim, ...]
    table: tuple[Mapping[str, object], ...] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "machine": machine(),
            "claims": [asdict(claim) for claim in self.claims],
            "table": [dict(row) for row in self.table],
        }
