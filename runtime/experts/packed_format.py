"""The files of a packed model, as `serai pack` writes them and `open_source` reads them.

A packed model is an ordinary model folder of valid safetensors files:

- `experts-LLLLL.safetensors`, one for each layer L with experts: `model.layers.L.block_sparse_moe.experts.records`,
  uint8 `[experts, record_bytes]`, which begins at a multiple of 4,096 bytes of the file (the header is padded with
  spaces to that), so that each record can be read directly; and behind it `.checksums`, uint8 `[experts, 32]`, the
  blake3 of each record.
- `trunk-NNNNN.safetensors`: every other tensor of the model under its own name, byte for byte.
- `model.safetensors.index.json`, `config.json` and the tokenizer's files.
- `serai-pack.json`, written last: without it the folder is unfinished. It says what the records are (`layout`), which
  weights they were made from (`source_weights`, the identity of the original) and whether they are the same numbers
  (`experts` is "as stored") or were quantised ("mxfp4").
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from serai.kernels.experts import ExpertLayout
from serai.kernels.matrix import Format
from serai.runtime.errors import WeightsInvalid
from serai.runtime.experts.cache import PAGE_BYTES
from serai.runtime.models.config import MXFP4_GROUP, ExpertFormat, ModelConfig, ModelFamily, MoeConfig, parse_config
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.safetensors_header import TensorInfo
from serai.runtime.models.strict_json import JsonError, parse_json_object, shown
from serai.runtime.models.tensor_table import expert_layers

MANIFEST_NAME = "serai-pack.json"
FORMAT = 1
CHECKSUM_BYTES = 32
AS_STORED = "as stored"
MXFP4 = "mxfp4"

_MOST_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `serai-pack.json` holds."""

    format: int
    experts: str
    layout: str
    record_bytes: int
    source_weights: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def records_name(prefix: str, layer: int) -> str:
    """The tensor with a layer's records."""
    return f"{prefix}model.layers.{layer}.block_sparse_moe.experts.records"


def checksums_name(prefix: str, layer: int) -> str:
    """The tensor with their checksums."""
    return f"{prefix}model.layers.{layer}.block_sparse_moe.experts.checksums"


def layer_file(layer: int) -> str:
    return f"experts-{layer:05d}.safetensors"


def layout_text(weight_format: Format, latent: int, inner: int) -> str:
    """One line that differs whenever records differ; the number goes up with the order of a record's bytes."""
    return f"order 1, {weight_format.value}, {latent} x {inner}"


def quantised_config(config: ModelConfig) -> ModelConfig:
    """The same model with its experts in MXFP4. Raises `ConfigInvalid` when their sizes are no multiples of 32."""
    raw = json.loads(config.raw)
    text = raw if config.family is ModelFamily.KIMI_LINEAR else raw["text_config"]
    weights = {"num_bits": 4, "type": "float", "group_size": MXFP4_GROUP, "strategy": "group", "symmetric": True}
    text["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": ExpertFormat.MXFP4.value,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.*"],
    }
    return parse_config(raw)


def read_manifest(folder: Path, name: str = MANIFEST_NAME) -> Manifest | None:
    """What the folder says about itself; None when it isn't a (finished) packed model. Raises `WeightsInvalid`."""
    path = folder / name
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsInvalid(f"{path} can't be read ({error.strerror})") from error
    try:
        values = parse_json_object(data)
    except JsonError as error:
        raise WeightsInvalid(f"{path} {error}") from None
    if values.get("format") != FORMAT:
        raise WeightsInvalid(
            f"{path} has format {shown(values.get('format'))}, but this version reads {FORMAT}; pack the model again"
        )
    fields = {"format": int, "experts": str, "layout": str, "record_bytes": int, "source_weights": str}
    for field, kind in fields.items():
        if type(values.get(field)) is not kind:
            raise WeightsInvalid(f"{path}: {field} is {shown(values.get(field))}, but must be a {kind.__name__}")
    return Manifest(**{field: values[field] for field in fields})  # type: ignore[arg-type]  # checked just above


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A packed model whose headers were checked: where each layer's records lie."""

    folder: Path
    manifest: Manifest
    layout: ExpertLayout
    experts: int
    records: Mapping[int, TensorInfo]
    checksums: Mapping[int, TensorInfo]

    @property
    def record_bytes(self) -> int:
        return self.manifest.record_bytes

    @property
    def tensor_names(self) -> frozenset[str]:
        """The tensors that stand for the experts' own."""
        return frozenset(info.name for infos in (self.records, self.checksums) for info in infos.values())

    @classmethod
    def find(cls, config: ModelConfig, files: CheckpointFiles, prefix: str) -> "PackedModel | None":
        """None for a folder that isn't packed. Raises `WeightsInvalid` when a packed one doesn't fit its configuration
        or this version."""
        manifest = read_manifest(files.folder)
        if manifest is None:
            return None
        moe = config.moe
        if moe is None:
            raise WeightsInvalid(f"{files.folder / MANIFEST_NAME} promises experts, but config.json has none")
        layers = expert_layers(config)
        records = {layer: files.info(records_name(prefix, layer)) for layer in layers}
        checksums = {layer: files.info(checksums_name(prefix, layer)) for layer in layers}
        for info in records.values():
            _check(info, (moe.experts, manifest.record_bytes))
            if info.offset % PAGE_BYTES or manifest.record_bytes % PAGE_BYTES:
                raise WeightsInvalid(
                    f"{info.file}: the records of {manifest.record_bytes:,} bytes begin at byte {info.offset:,}, but "
                    f"both must be multiples of {PAGE_BYTES}"
                )
        for info in checksums.values():
            _check(info, (moe.experts, CHECKSUM_BYTES))
        return cls(files.folder, manifest, _layout(moe, files.folder, manifest), moe.experts, records, checksums)


def _layout(config: MoeConfig, folder: Path, manifest: Manifest) -> ExpertLayout:
    """The layout the records are in, if this version reads it."""
    for weight_format in Format:
        if manifest.layout == layout_text(weight_format, config.latent, config.inner):
            layout = ExpertLayout(weight_format, config.latent, config.inner)
            if layout.record_bytes == manifest.record_bytes:
                return layout
    raise WeightsInvalid(
        f"the records in {folder} are {manifest.layout!r}, {manifest.record_bytes:,} bytes each, which this version "
        "does not read; pack the model again"
    )


def _check(info: TensorInfo, shape: tuple[int, int]) -> None:
    if (info.dtype, info.shape) != ("U8", shape):
        raise WeightsInvalid(
            f"tensor {shown(info.name)} in {info.file} is {info.dtype} {list(info.shape)}, but must be U8 {list(shape)}"
        )
