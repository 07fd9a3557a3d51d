"""Options that say how tokens are chosen; `SamplingParams` checks the values."""

from collections.abc import Sequence
from typing import Annotated

import typer

Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the fewest tokens with this share.")]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens below this times the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", help="1 is neutral.")]
PresencePenalty = Annotated[float, typer.Option("--presence-penalty", help="0 is neutral.")]
FrequencyPenalty = Annotated[float, typer.Option("--frequency-penalty", help="0 is neutral.")]
LogitBias = Annotated[
    list[str] | None, typer.Option("--logit-bias", metavar="ID=BIAS", help="Repeat for several tokens.")
]
Seed = Annotated[int | None, typer.Option(help="Makes the drawing repeatable. Default: drawn, and kept.")]
MinTokens = Annotated[int, typer.Option("--min-tokens", help="Fewest tokens before a stop token may come.")]


def logit_biases(given: Sequence[str]) -> dict[int, float]:
    """What was given as ID=BIAS. Raises `BadParameter` for anything else."""
    from serai.runtime.errors import BadParameter

    biases: dict[int, float] = {}
    for one in given:
        token, _, bias = one.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise BadParameter(f"--logit-bias takes a token id and a number, such as 42=-5, and is {one!r}") from None
    return biases
