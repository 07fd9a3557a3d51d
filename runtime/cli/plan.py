"""`serai plan`: what a model and its sessions take in memory, before anything is loaded or even downloaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from serai.runtime.cli.options import Budget, ExpertsPerToken, Json, Latents, Precision, PrecisionName, Trunk
from serai.runtime.cli.output import bytes_text, pairs, reporting, table
from serai.runtime.cli.plan_compare import COMPARED_CONTEXTS, comparison_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from serai.runtime.memory.limits import DefaultBudget
    from serai.runtime.memory.plan import ByLatents, MemoryPlan
    from serai.runtime.models.config import ModelConfig
    from serai.runtime.models.safetensors_files import CheckpointFiles


def plan(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help='A config.json, a model folder (weights not needed), "nano", or ORG/NAME.'),
    ],
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of each session. \\[default: 4096]")] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions to hold in memory at once.")] = 1,
    budget: Budget = None,
    precision: Precision = PrecisionName.FAST,
    trunk: Trunk = None,
    latents: Latents = None,
    experts_per_token: ExpertsPerToken = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Only show what a context costs here and under other kinds of attention.")
    ] = False,
    projected: Annotated[
        bool, typer.Option("--project", help="Measure disk and processor, and say how fast it and Kimi K3 would be.")
    ] = False,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="D", help="The folder whose disk --project measures. \\[default: this one]")
    ] = Path(),
    disk_rate: Annotated[
        str | None,
        typer.Option("--disk-rate", metavar="SIZE", help='Bytes a second, such as "7GB", instead of measuring.'),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a model and its sessions take in memory. A budget that is too small is an error, as it is for run."""
    from serai.checkpoints.snapshot import LatentType
    from serai.runtime.cli.plan_project import measured_speeds, projections
    from serai.runtime.memory.byte_sizes import parse_bytes
    from serai.runtime.memory.plan import DEFAULT_CONTEXT_TOKENS, check_budget, plan_memory, sessions_that_fit
    from serai.runtime.models.fewer_experts import with_experts_per_token
    from serai.runtime.models.layout import latent_type
    from serai.runtime.models.trunk import Trunk as HeldTrunk

    with reporting(as_json=as_json) as out:
        fast, held = precision is PrecisionName.FAST, HeldTrunk.parse(trunk)
        kept = latent_type(latents, fast=fast)
        config, files = _read(path)
        config = with_experts_per_token(config, experts_per_token)
        try:
            made = plan_memory(config, files, context_tokens=context or DEFAULT_CONTEXT_TOKENS, trunk=held, fast=fast)
        finally:
            if files is not None:
                files.close()
        default = _default_budget()
        if budget is not None:
            budget_bytes, source = parse_bytes(budget), "given"
            check_budget(made, budget_bytes, kept)
        else:
            budget_bytes, source = (0, "unknown") if default is None else (default.budget_bytes, default.bound.name)
        needed = {
            kind.value: made.floor_bytes.of(kind) + (sessions - 1) * made.hot_session_bytes.of(kind)
            for kind in LatentType
        }
        fit = {kind.value: sessions_that_fit(made, budget_bytes, kind) for kind in LatentType}
        fits = needed[kept.value] <= budget_bytes
        verdict = "fits" if fits else "does not fit"
        values = made.to_json() | {
            "sessions": sessions,
            "sessions_needed_bytes": needed,
            "precision": precision.value,
            "latents": kept.value,
            "budget_bytes": budget_bytes,
            "budget_source": source,
            "sessions_that_fit": fit,
            "fits": fits,
        }
        if compare:
            out.result(values | {"compared_contexts": list(COMPARED_CONTEXTS)}, comparison_table(made.comparison))
            return
        if projected:
            speeds = measured_speeds(folder, disk_rate, made.expert_slot_bytes, held, fast=fast, tell=out.note)
            told = projections(config, made, speeds, budget_bytes, kept, held, fast=fast)
            out.result(values | {"projection": told.to_json()}, *told.tables())
            return
        out.result(
            values,
            _model_table(made),
            _session_table(made, sessions, needed),
            _comparison_table(made),
            _budget_table(budget_bytes, source, fit),
            f"{sessions:,} in {precision.value} precision with {kept.value} latents: "
            f"{bytes_text(needed[kept.value])}, which {verdict}",
        )


def _read(path: str) -> "tuple[ModelConfig, CheckpointFiles | None]":
    """The configuration, and the headers of the weights when there are any."""
    from serai.runtime.errors import SeraiError
    from serai.runtime.models.config import load_config
    from serai.runtime.models.locate import locate_model
    from serai.runtime.models.safetensors_files import CheckpointFiles

    file = Path(path)
    if file.is_file():
        return load_config(file), None
    folder = locate_model(path)
    config = load_config(folder)
    if not any(folder.glob("*.safetensors")):
        return config, None
    from serai.runtime.models.open_model import (
        check_files,
    )  # brings the compiler, which configurations alone don't need

    files = CheckpointFiles.open(folder)
    try:
        check_files(config, files)
    except SeraiError:
        files.close()
        raise
    return config, files


def _default_budget() -> "DefaultBudget | None":
    """None where the system doesn't say how much memory is free; only opening a model has to know."""
    from serai.runtime.errors import BadParameter
    from serai.runtime.memory.limits import default_budget

    try:
        return default_budget()
    except BadParameter:
        return None


def _model_table(made: "MemoryPlan") -> Table:
    experts = f"{made.moe_layers} layers × {made.experts_per_layer} × {bytes_text(made.expert_bytes)}"
    told = "the headers of its weights" if made.source == "headers" else "config.json alone"
    return pairs(
        [
            (f"Trunk, {made.trunk}", bytes_text(made.trunk_bytes)),
            ("Experts", f"{bytes_text(made.experts_total_bytes)} ({experts})" if made.experts_per_layer else "none"),
            ("Experts one token visits", f"{made.token_experts} = {bytes_text(made.token_expert_bytes)}"),
            ("Fewest expert slots", f"{made.min_expert_slots}: {made.min_expert_slots_rule}"),
            ("Scratch", f"{bytes_text(made.scratch_bytes)} for steps of {made.step_rows} rows"),
            ("Process", bytes_text(made.process_bytes)),
            ("For wide steps, when streaming", f"{bytes_text(made.wide_scratch_bytes)} for {made.wide_rows} rows more"),
        ],
        title=f"The model ({made.family}), from {told}",
    )


def _session_table(made: "MemoryPlan", sessions: int, needed: dict[str, int]) -> Table:
    columns = (f"{kind} latents" for kind in needed)
    shown = table("", *columns, title=f"\nA session of {made.context_tokens:,} tokens")

    def row(name: str, values: "Iterable[int]") -> None:
        shown.add_row(name, *(bytes_text(value) for value in values))

    def row_by(name: str, figure: "ByLatents") -> None:
        row(name, (figure.float32, figure.bfloat16, figure.q8))

    row(f"KDA state ({made.kda_layers} layers)", [made.kda_bytes] * len(needed))
    row("Convolution tails", [made.conv_bytes] * len(needed))
    row_by(f"Latents ({made.mla_layers} layers)", made.latent_bytes)
    row_by("  for each token", made.latent_token_bytes)
    row_by("Whole state", made.session_bytes)
    row_by("Held in memory", made.hot_session_bytes)
    row_by("While it runs", made.running_session_bytes)
    row_by("Floor: everything resident, one session", made.floor_bytes)
    if made.experts_per_layer:
        row_by("Floor with experts read from disk", made.streaming_floor_bytes)
        row_by("Working set: the experts of one token", made.working_set_bytes)
    if sessions > 1:
        row(f"{sessions:,} sessions at once", needed.values())
    return shown


def _comparison_table(made: "MemoryPlan") -> Table:
    shown = table(
        "", "each token", f"{made.context_tokens:,} tokens", title="\nThe same context elsewhere (16-bit values)"
    )
    for cost in made.comparison:
        shown.add_row(cost.name, bytes_text(cost.token_bytes), bytes_text(cost.session_bytes(made.context_tokens)))
    return shown


def _budget_table(budget_bytes: int, source: str, fit: dict[str, int]) -> Table:
    if source == "unknown":
        return pairs([("Budget", "this system doesn't say how much memory is free; give --budget")])
    told = "as given" if source == "given" else f"what is free here, by {source}"
    return pairs(
        [
            ("Budget", f"{bytes_text(budget_bytes)}, {told}"),
            ("Sessions that fit", ", ".join(f"{count:,} with {kind} latents" for kind, count in fit.items())),
        ],
        title="\nHow many fit",
    )
