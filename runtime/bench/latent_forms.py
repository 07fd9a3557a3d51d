"""`serai bench latents`: what latents of fewer bits cost the nano model (`quality.py`), and what a token then takes."""

from collections.abc import Callable
from dataclasses import asdict

from serai.checkpoints.snapshot import LatentType
from serai.runtime.bench.quality import Asked, Exam, quality_claims
from serai.runtime.bench.report import Claim, Report
from serai.runtime.models.open_model import Precision, find_model, load_model

STEP_ROWS = 256

FULL = Asked(compared={1024: 10, 4096: 4}, asked={1024: 40, 4096: 40})
QUICK = Asked(compared={1024: 2}, asked={1024: 4})


def bench_latents(*, quick: bool, tell: Callable[[str], None], asked: Asked | None = None) -> Report:
    """A row for each form of latents, in fast precision, compared with float32."""
    found = find_model("nano")
    whole_model = load_model(found, Precision.FAST, max_rows=STEP_ROWS, latents=LatentType.FLOAT32)
    exam = Exam(found, whole_model, asked or (QUICK if quick else FULL))
    whole_model.model.close()
    held = {}
    for latents in LatentType:
        tell(f"{latents.value} latents")
        loaded = load_model(found, Precision.FAST, max_rows=STEP_ROWS, latents=latents)
        held[latents] = exam.take(found, loaded), loaded.layout.token_bytes
        loaded.model.close()
    found.files.close()
    whole, whole_bytes = held[LatentType.FLOAT32]
    claims: list[Claim] = []
    for latents, (one, token_bytes) in held.items():
        if latents is not LatentType.FLOAT32:
            name, how = f"latents_{latents.value}", f"nano in fast precision with {latents.value} latents"
            claims += quality_claims(name, one, whole, how=how, against="float32 latents")
            told = f"{token_bytes:,} of float32's {whole_bytes:,} bytes a token; {how}"
            claims.append(Claim.measured(f"{name}_bytes", token_bytes / whole_bytes, "of the bytes", told))
    rows = tuple({"latents": kind.value, **asdict(one), "token_bytes": size} for kind, (one, size) in held.items())
    return Report("latents", tuple(claims), rows)
