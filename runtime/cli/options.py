"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class PrecisionName(StrEnum):
    """The names of the two precisions, known without loading the engine."""

    EXACT = "exact"
    FAST = "fast"


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help='"nano", a model folder, or ORG/NAME from the local Hugging Face cache.')
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="SIZE", help='The most memory to use, such as "2GiB". \\[default: what is free]'),
]
Precision = Annotated[
    PrecisionName,
    typer.Option("--precision", help="float32 or 8-bit activations; with float32 or bfloat16 latents, if not told."),
]
Latents = Annotated[
    str | None,
    typer.Option(
        "--latents",
        metavar="float32|bfloat16|q8",
        help="How sessions keep what attention reads; q8 takes half of bfloat16. \\[default: by precision]",
    ),
]
Trunk = Annotated[
    str | None,
    typer.Option("--trunk", metavar="q8|q4", help="Hold the large projections in 8 or 4 bits. \\[default: as stored]"),
]
ExpertsPerToken = Annotated[
    int | None,
    typer.Option(
        "--experts-per-token",
        metavar="N",
        help="Visit fewer experts than the model was trained with: faster, and worse. \\[default: the model's own]",
    ),
]
WarmStart = Annotated[
    bool,
    typer.Option(
        "--warm-start",
        help="Where experts are read from disk: begin with those used most last time, kept in the model's folder.",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Record which experts steps want, for serai bench cache --trace."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads to compute with. \\[default: the cores there are]")
]
