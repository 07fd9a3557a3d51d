"""Makes a packed model (`packed_format.py`) out of a released one, which is only ever read.

A file gets its name only when all of it is durable, so packing that was stopped goes on with the first missing file.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blake3 import blake3

from serai.runtime.errors import BadParameter
from serai.runtime.experts.cache import aligned_bytes
from serai.runtime.experts.errors import FileEnded, PackFailed
from serai.runtime.experts.pack_files import Piece, PlannedFile, StoredTensor, write_whole
from serai.runtime.experts.pack_records import RecordMaker
from serai.runtime.experts.packed_format import (
    AS_STORED,
    CHECKSUM_BYTES,
    FORMAT,
    MANIFEST_NAME,
    MXFP4,
    Manifest,
    PackedModel,
    checksums_name,
    layer_file,
    layout_text,
    quantised_config,
    read_manifest,
    records_name,
)
from serai.runtime.experts.source import DirectSource, PackedSource
from serai.runtime.models.config import ExpertFormat, ModelConfig
from serai.runtime.models.safetensors_files import INDEX_NAME, CheckpointFiles
from serai.runtime.models.tensor_table import expert_layers, trunk_tensors
from serai.runtime.models.weight_identity import weight_identity

UNFINISHED_NAME = "serai-pack.unfinished.json"
TRUNK_FILE_BYTES = 4 << 30
"""The trunk is cut into files of about this, so that a stopped pack loses little."""

_COPY_BYTES = 16 << 20
_SPARE_BYTES = 64 << 20
"""Left free on the disk beyond what the files take."""

_COMPANION_SUFFIXES = (".json", ".model", ".jinja", ".txt")
"""What a model folder holds beside weights: tokenizer, chat template, generation settings, licence."""
_MOST_COMPANION_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PackProgress:
    """`done_bytes` of `total_bytes` of this stage: "pack" or "verify"."""

    stage: str
    done_bytes: int
    total_bytes: int


Progress = Callable[[PackProgress], None]


@dataclass(frozen=True, slots=True)
class PackReport:
    """What packing did. `kept_files` were whole from an earlier run. `relative_error` is what quantising changed, root
    mean square over that of the weights, in the layers of this run; None when it quantised none."""

    folder: Path
    written_bytes: int
    kept_files: int
    relative_error: float | None
    verified_records: int
    seconds: float


def pack_model(
    config: ModelConfig,
    files: CheckpointFiles,
    prefix: str,
    out: Path,
    *,
    experts: str = AS_STORED,
    verify: bool = False,
    threads: int = 2,
    progress: Progress | None = None,
) -> PackReport:
    """Pack the model in `files` into the folder `out`, made if need be; goes on where an earlier call was stopped.

    `experts="mxfp4"` quantises BF16 or F32 experts; "as stored" keeps their numbers. `verify` re-reads every record
    from disk and compares its checksum. Raises `BadParameter` for a model or an option that can't be packed,
    `PackFailed` when `out` holds something else, the disk is too small, or a record reads back wrong.
    """
    started_s = time.monotonic()
    packed_config = _check_request(config, files, out, experts)
    maker = RecordMaker(DirectSource(config, files, prefix), quantise=experts == MXFP4, threads=threads)
    try:
        layout = maker.layout
        text = layout_text(layout.format, layout.latent, layout.inner)
        _claim(out, Manifest(FORMAT, experts, text, layout.record_bytes, weight_identity(files)))
        planned = [*_trunk_files(config, files, prefix), *_expert_files(config, prefix, maker)]
        missing = [file for file in planned if not file.is_whole_in(out)]
        written = _write_files(out, missing, progress)
        error = maker.relative_error
    finally:
        maker.close()
    _write_companions(files.folder, out, packed_config, planned)
    (out / UNFINISHED_NAME).rename(out / MANIFEST_NAME)
    verified = verify_pack(packed_config, out, prefix, progress) if verify else 0
    kept = len(planned) - len(missing)
    return PackReport(out, written, kept, error, verified, time.monotonic() - started_s)


def verify_pack(config: ModelConfig, folder: Path, prefix: str, progress: Progress | None = None) -> int:
    """Read every record of a packed model from disk and compare its checksum; gives their number.

    Raises `PackFailed` at the first that differs, naming file, layer and expert.
    """
    with CheckpointFiles.open(folder) as files:
        model = PackedModel.find(config, files, prefix)
        if model is None:
            raise PackFailed(f"{folder} has no {MANIFEST_NAME}, so it is no finished pack")
        source = PackedSource(model)
        try:
            return _verify(source, files, prefix, progress)
        except (OSError, FileEnded) as failure:
            raise PackFailed(f"{folder} can't be verified: {failure}") from failure
        finally:
            source.close()


def _verify(source: PackedSource, files: CheckpointFiles, prefix: str, progress: Progress | None) -> int:
    record, scratch = aligned_bytes(source.record_bytes), aligned_bytes(source.scratch_bytes)
    total = len(source.layers) * source.experts
    done = 0
    for layer in source.layers:
        checksums = files.read(checksums_name(prefix, layer))
        for expert in range(source.experts):
            source.read(layer, expert, record, scratch)
            if blake3(record.data).digest() != checksums[expert].tobytes():
                raise PackFailed(
                    f"{source.path(layer, expert)}: expert {expert} of layer {layer} is not what was written; delete "
                    f"that file and {MANIFEST_NAME}, and pack again"
                )
            done += 1
            if progress is not None:
                progress(PackProgress("verify", done * source.record_bytes, total * source.record_bytes))
    return total


def _check_request(config: ModelConfig, files: CheckpointFiles, out: Path, experts: str) -> ModelConfig:
    """Refuse what can't work before anything is written; gives the packed model's configuration."""
    if config.moe is None:
        raise BadParameter("this model has no routed experts, so there is nothing to pack")
    if experts not in (AS_STORED, MXFP4):
        raise BadParameter(f"experts can be {AS_STORED!r} or {MXFP4!r}, not {experts!r}")
    if read_manifest(files.folder) is not None:
        raise BadParameter(f"{files.folder} is packed already; pack the model it was made from")
    source, target = Path(os.path.realpath(files.folder)), Path(os.path.realpath(out))
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise PackFailed(f"{out} is not apart from the model folder {files.folder}; pack into another")
    if experts == AS_STORED:
        return config
    if config.expert_format is ExpertFormat.MXFP4:
        raise BadParameter("the experts of this model are MXFP4 already; pack them as stored")
    return quantised_config(config)


def _claim(out: Path, manifest: Manifest) -> None:
    """Make the folder, or make sure that it holds an earlier run of this same pack; it is unfinished from now on."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackFailed(f"the folder {out} can't be made ({error.strerror})") from error
    finished = read_manifest(out)
    found = finished or read_manifest(out, UNFINISHED_NAME)
    if found is not None and found != manifest:
        raise PackFailed(
            f"{out} holds a pack of other weights or with other options (experts {found.experts}, {found.layout}); "
            "pack into another folder"
        )
    if finished is not None:
        (out / MANIFEST_NAME).rename(out / UNFINISHED_NAME)
    elif found is None:
        if any(out.iterdir()):
            raise PackFailed(f"{out} holds files that are no pack of this model; pack into an empty folder")
        write_whole(out, UNFINISHED_NAME, [_json(manifest.to_json())])


def _trunk_files(config: ModelConfig, files: CheckpointFiles, prefix: str) -> Iterator[PlannedFile]:
    """The tensors of the trunk, byte for byte."""
    runs: list[list[StoredTensor]] = [[]]
    for name in trunk_tensors(config):
        info = files.info(prefix + name)
        if runs[-1] and sum(tensor.nbytes for tensor in runs[-1]) + info.nbytes > TRUNK_FILE_BYTES:
            runs.append([])
        runs[-1].append(StoredTensor(info.name, info.dtype, info.shape, info.nbytes))
    for number, run in enumerate(runs, start=1):
        yield PlannedFile(f"trunk-{number:05d}.safetensors", run, partial(_copied, files, run))


def _copied(files: CheckpointFiles, tensors: Sequence[StoredTensor]) -> Iterator[Piece]:
    for tensor in tensors:
        for start in range(0, tensor.nbytes, _COPY_BYTES):
            yield files.read_bytes(tensor.name, start, min(_COPY_BYTES, tensor.nbytes - start))


def _expert_files(config: ModelConfig, prefix: str, maker: RecordMaker) -> Iterator[PlannedFile]:
    """A file for each layer: its records, then their checksums."""
    experts = 0 if config.moe is None else config.moe.experts
    record_bytes = maker.layout.record_bytes
    for layer in expert_layers(config):
        tensors = (
            StoredTensor(records_name(prefix, layer), "U8", (experts, record_bytes), experts * record_bytes),
            StoredTensor(checksums_name(prefix, layer), "U8", (experts, CHECKSUM_BYTES), experts * CHECKSUM_BYTES),
        )
        yield PlannedFile(layer_file(layer), tensors, partial(_records_and_checksums, maker, layer))


def _records_and_checksums(maker: RecordMaker, layer: int) -> Iterator[Piece]:
    checksums = []
    for record in maker.records(layer):
        checksums.append(blake3(record.data).digest())
        yield record.data
    yield b"".join(checksums)


def _write_files(out: Path, missing: Sequence[PlannedFile], progress: Progress | None) -> int:
    total = sum(file.nbytes for file in missing)
    free = shutil.disk_usage(out).free
    if missing and free < total + _SPARE_BYTES:
        raise PackFailed(
            f"packing into {out} takes {total:,} more bytes, but the disk has {free:,} free; "
            f"{total + _SPARE_BYTES - free:,} are missing"
        )
    written = 0

    def wrote(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if progress is not None:
            progress(PackProgress("pack", written, total))

    for file in missing:
        write_whole(out, file.name, file.pieces(), wrote)
    return written


def _write_companions(source: Path, out: Path, config: ModelConfig, planned: Sequence[PlannedFile]) -> None:
    """The index, the configuration, and whatever else belongs to the model."""
    weight_map = {tensor.name: file.name for file in planned for tensor in file.tensors}
    write_whole(out, INDEX_NAME, [_json({"metadata": {}, "weight_map": weight_map})])
    write_whole(out, "config.json", [_json(json.loads(config.raw))])
    own = (INDEX_NAME, "config.json", MANIFEST_NAME, UNFINISHED_NAME)
    for path in sorted(source.iterdir()):
        wanted = path.suffix in _COMPANION_SUFFIXES or path.name.startswith("LICENSE")
        if wanted and path.name not in own and path.is_file() and path.stat().st_size <= _MOST_COMPANION_BYTES:
            write_whole(out, path.name, [path.read_bytes()])


def _json(values: dict[str, object]) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"
