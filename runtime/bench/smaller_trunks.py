"""`serai bench trunk`: what a trunk of 8 or 4 bits costs the nano model (`quality.py`), and the bytes it saves."""

from collections.abc import Callable
from dataclasses import asdict

from serai.runtime.bench import quality
from serai.runtime.bench.quality import Asked, Exam, quality_claims
from serai.runtime.bench.report import Claim, Report
from serai.runtime.models.open_model import Precision, find_model, load_model
from serai.runtime.models.trunk import Trunk

STEP_ROWS = 256


def bench_trunk(*, quick: bool, tell: Callable[[str], None], asked: Asked | None = None) -> Report:
    """A row for each way of holding the trunk, in fast precision."""
    found = find_model("nano")
    stored = load_model(found, Precision.FAST, max_rows=STEP_ROWS)
    exam = Exam(found, stored, asked or (quality.QUICK if quick else quality.FULL))
    stored.model.close()
    held = {}
    for trunk in Trunk:
        tell(f"the trunk {trunk.value}")
        loaded = load_model(found, Precision.FAST, max_rows=STEP_ROWS, trunk=trunk)
        held[trunk] = exam.take(found, loaded), loaded.model.weights.bytes
        loaded.model.close()
    found.files.close()
    whole, whole_bytes = held[Trunk.AS_STORED]
    claims: list[Claim] = []
    for trunk, (one, trunk_bytes) in held.items():
        if trunk is not Trunk.AS_STORED:
            how = f"nano in fast precision with a trunk of {trunk.value}"
            claims += quality_claims(f"trunk_{trunk.value}", one, whole, how=how, against="as stored")
            told = f"{trunk_bytes:,} of {whole_bytes:,} bytes; {how}"
            claims.append(Claim.measured(f"trunk_{trunk.value}_bytes", trunk_bytes / whole_bytes, "of the bytes", told))
    rows = tuple({"trunk": trunk.value, **asdict(one), "trunk_bytes": size} for trunk, (one, size) in held.items())
    return Report("trunk", tuple(claims), rows)
