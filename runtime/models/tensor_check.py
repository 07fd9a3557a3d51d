"""Holds a checkpoint's headers against the table, before anything is loaded."""

from collections.abc import Iterable, Mapping
from itertools import islice

from serai.runtime.errors import WeightsInvalid
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.safetensors_header import TensorInfo
from serai.runtime.models.strict_json import shown
from serai.runtime.models.tensor_table import (
    HEAD,
    IGNORED_PARTS,
    TensorRole,
    TensorSpec,
    expected_tensors,
    find_prefix,
    trunk_tensors,
)

_NAMED = 3
"""How many tensors an error names before it counts the rest."""


def check_tensors(
    config: ModelConfig, files: CheckpointFiles, packed: frozenset[str] = frozenset()
) -> dict[str, TensorSpec]:
    """Every tensor that will be loaded, by its full name in `files`, each of a shape and element type that fits.

    Raises `WeightsInvalid` naming missing, mis-shaped and superfluous tensors. Vision tensors are passed over, and
    so is an lm_head beside a tied embedding: the embedding gives the logits then. The tensors `packed` stand for the
    routed experts, which are not looked for when there are any.
    """
    prefix = find_prefix(config, files.tensors)
    if packed:
        expected = {prefix + name: spec for name, spec in trunk_tensors(config).items()}
    else:
        expected = expected_tensors(config, prefix)
    _check_complete(expected, files, packed | ({prefix + HEAD} if config.tie_word_embeddings else set()))
    problems = (
        problem for name, spec in expected.items() if (problem := _misfit(spec, files.tensors[name])) is not None
    )
    if (first := next(problems, None)) is not None:
        more = sum(1 for _ in problems)
        raise WeightsInvalid(first + (f" ({more:,} more tensors don't fit either)" if more else ""))
    _check_experts_alike(expected, files.tensors)
    return expected


def _check_complete(expected: Mapping[str, TensorSpec], files: CheckpointFiles, others: frozenset[str]) -> None:
    missing = [name for name in expected if name not in files.tensors]
    extra = [
        name
        for name in files.tensors
        if name not in expected and name not in others and not name.startswith(IGNORED_PARTS)
    ]
    if missing:
        message = (
            f"{files.folder} lacks {_listed(missing)}, which config.json calls for; "
            f"looked in {_listed(files.file_names, '')}"
        )
        if extra:
            message += f"; it holds {_listed_with_files(extra, files)} instead"
        raise WeightsInvalid(message)
    if extra:
        raise WeightsInvalid(
            f"{files.folder} holds {_listed_with_files(extra, files)}, for which config.json has no place"
        )


def _misfit(spec: TensorSpec, info: TensorInfo) -> str | None:
    if not spec.accepts(info.shape):
        return (
            f"tensor {shown(info.name)} in {info.file} is {list(info.shape)}, but config.json makes it "
            f"{spec.shape_text()}"
        )
    if info.dtype not in spec.dtypes:
        return (
            f"tensor {shown(info.name)} in {info.file} is {info.dtype}, but must be {' or '.join(sorted(spec.dtypes))}"
        )
    return None


def _check_experts_alike(expected: Mapping[str, TensorSpec], tensors: Mapping[str, TensorInfo]) -> None:
    """All routed experts share one element type, so that any expert fits any slot of the expert cache."""
    first: TensorInfo | None = None
    for name, spec in expected.items():
        if spec.role is not TensorRole.EXPERT or "F32" not in spec.dtypes:
            continue
        info = tensors[name]
        if first is None:
            first = info
        elif info.dtype != first.dtype:
            raise WeightsInvalid(
                f"tensor {shown(name)} in {info.file} is {info.dtype} where {shown(first.name)} is {first.dtype}; "
                "all routed experts must have one element type"
            )


def _listed(names: Iterable[str], noun: str = "tensor ") -> str:
    every = list(names)
    text = ", ".join(shown(name) for name in islice(every, _NAMED))
    more = len(every) - _NAMED
    return f"{noun}{text}" + (f" and {more:,} more" if more > 0 else "")


def _listed_with_files(names: list[str], files: CheckpointFiles) -> str:
    text = ", ".join(f"{shown(name)} (in {files.tensors[name].file})" for name in names[:_NAMED])
    more = len(names) - _NAMED
    return f"tensor {text}" + (f" and {more:,} more" if more > 0 else "")
