"""`serai eval`: logits, greedy tokens and state as arrays, to hold the engine against another implementation."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from zipfile import BadZipFile

import typer

from serai.runtime.cli.options import (
    Budget,
    ExpertsPerToken,
    Json,
    Latents,
    Model,
    Precision,
    PrecisionName,
    Threads,
    Trunk,
)
from serai.runtime.cli.output import FAILED, reporting

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray


def evaluate_model(
    model: Model,
    tokens: Annotated[Path, typer.Option(metavar="T.npy", help="Token ids, one row of integers.")],
    out: Annotated[Path, typer.Option(metavar="O.npz", help="Where to write the arrays.")],
    split: Annotated[
        int | None, typer.Option(metavar="P", help="Prompt length of the cached decode. \\[default: half]")
    ] = None,
    greedy: Annotated[int, typer.Option(min=0, help="Greedy tokens to add after the last one.")] = 24,
    precision: Precision = PrecisionName.EXACT,
    trunk: Trunk = None,
    latents: Latents = None,
    experts_per_token: ExpertsPerToken = None,
    budget: Budget = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write prefill, decode and step logits [T, V], greedy tokens, and the state after T tokens. Fails unless the three
    logits are equal bit for bit."""
    with reporting(as_json=as_json) as output:
        from serai.runtime.checks.evaluation import checked_tokens, evaluate, first_difference
        from serai.runtime.cli.opening import open_model

        ids = _read_tokens(tokens)
        _check_writable(out)
        with open_model(
            model,
            precision=precision.value,
            trunk=trunk,
            latents=latents,
            experts_per_token=experts_per_token,
            budget=budget,
            threads=threads,
        ) as opened:
            ids = checked_tokens(ids, opened.found.config.vocab_size)
            prompt = max(1, len(ids) // 2) if split is None else split
            began_s = time.monotonic()
            arrays = evaluate(opened.loaded, ids, prompt, greedy)
            seconds = time.monotonic() - began_s
        _write(out, arrays)
        difference = first_difference(arrays)
        output.result(
            {
                "model": model,
                "precision": precision.value,
                "trunk": opened.loaded.fingerprint.trunk,
                "latents": opened.loaded.fingerprint.latents,
                "experts_per_token": opened.loaded.fingerprint.experts_per_token,
                "build": opened.loaded.fingerprint.build,
                "tokens": len(ids),
                "split": prompt,
                "vocab_size": opened.found.config.vocab_size,
                "greedy": arrays["greedy"].tolist(),
                "seconds": seconds,
                "out": str(out),
                "equal": difference is None,
                "difference": None if difference is None else str(difference),
            },
            f"{out}: {len(ids):,} tokens, {len(arrays)} arrays, {seconds:.1f} s, {precision.value}",
            "prefill, decode and step logits are equal bit for bit" if difference is None else "",
        )
        if difference is not None:
            output.note(f"serai: {difference}")
            raise typer.Exit(FAILED)


def _read_tokens(path: Path) -> "NDArray[np.integer]":
    import numpy as np

    from serai.runtime.errors import BadParameter

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise BadParameter(f"{path} can't be read as a .npy file of token ids: {error}") from None
    if not isinstance(found, np.ndarray):
        raise BadParameter(f"{path} holds several arrays; give a .npy file with one row of token ids")
    return found


def _check_writable(path: Path) -> None:
    """Before the work, not after it."""
    from serai.runtime.errors import BadParameter

    if not path.absolute().parent.is_dir() or path.is_dir():
        raise BadParameter(f"--out is {path}, which is a folder or lies in one that doesn't exist; name a file")


def _write(path: Path, arrays: "Mapping[str, NDArray[np.generic]]") -> None:
    """All arrays or no file: written beside it and renamed."""
    import numpy as np

    from serai.runtime.errors import BadParameter

    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # no array is named like an option
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise BadParameter(f"{path} can't be written: {error.strerror}; name a file that can be") from None
