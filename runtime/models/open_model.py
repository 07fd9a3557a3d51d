"""From a model's name to a model that can run: find, check everything that can be checked cheaply, then load."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from blake3 import blake3

from serai.checkpoints.snapshot import Fingerprint, LatentType, StateLayout
from serai.kernels.cache import build_id
from serai.kernels.cpu import chosen_path
from serai.runtime.chat import chat_format_id
from serai.runtime.errors import BadParameter, SeraiError
from serai.runtime.experts.access import Experts
from serai.runtime.experts.opening import open_experts
from serai.runtime.experts.packed_format import AS_STORED, PackedModel
from serai.runtime.experts.trace import TracedExperts, TraceRecorder
from serai.runtime.models.config import ModelConfig, load_config
from serai.runtime.models.fewer_experts import with_experts_per_token
from serai.runtime.models.kimi import KimiModel
from serai.runtime.models.layout import latent_type, state_layout
from serai.runtime.models.locate import locate_model
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.tensor_check import check_tensors
from serai.runtime.models.tensor_table import find_prefix
from serai.runtime.models.trunk import Trunk
from serai.runtime.models.weight_identity import weight_identity
from serai.runtime.models.weights import load_weights
from serai.runtime.text.tokenizer import Tokenizer


class Precision(Enum):
    """EXACT: float32 activations. FAST: 8-bit activations against 4-bit and 8-bit weights. Unless others are asked for,
    latents are float32 and bfloat16."""

    EXACT = "exact"
    FAST = "fast"

    @classmethod
    def parse(cls, name: "str | Precision") -> "Precision":
        """The precision of that name; raises `BadParameter`."""
        try:
            return cls(name)
        except ValueError:
            raise BadParameter(f"precision is 'exact' or 'fast', not {name!r}") from None


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model folder whose configuration and tensor headers have been checked; no weight has been read."""

    path: Path
    config: ModelConfig
    files: CheckpointFiles
    prefix: str
    tokenizer: Tokenizer | None
    packed: PackedModel | None

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with what identifies the states it makes."""

    model: KimiModel
    layout: StateLayout
    fingerprint: Fingerprint


def find_model(name: str | Path, *, experts_per_token: int | None = None) -> FoundModel:
    """Locate and check a model, to be run with so many experts for each token (`fewer_experts`; None: the model's own).

    Raises `ModelNotFound`, `ConfigInvalid`, `WeightsInvalid` or `BadParameter`, each naming its cause.
    """
    path = locate_model(name)
    config = with_experts_per_token(load_config(path), experts_per_token)
    files = CheckpointFiles.open(path)
    try:
        prefix, packed = check_files(config, files)
        tokenizer = Tokenizer.load(path, config.vocab_size) if Tokenizer.present(path) else None
    except SeraiError:
        files.close()
        raise
    return FoundModel(path, config, files, prefix, tokenizer, packed)


def check_files(config: ModelConfig, files: CheckpointFiles) -> tuple[str, PackedModel | None]:
    """Hold the headers against the configuration, be the experts as released or packed; gives the tensors' prefix and
    the packed model, if it is one. Raises `WeightsInvalid`."""
    prefix = find_prefix(config, files.tensors)
    packed = PackedModel.find(config, files, prefix)
    check_tensors(config, files, frozenset() if packed is None else packed.tensor_names)
    return prefix, packed


def load_model(
    found: FoundModel,
    precision: Precision,
    *,
    max_rows: int,
    trunk: Trunk = Trunk.AS_STORED,
    latents: LatentType | None = None,
    expert_slots: int | None = None,
    wide_rows: int = 0,
    recorder: TraceRecorder | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Read the weights and make the scratch for steps of `max_rows` rows; `progress(done, total)` counts layers.

    `latents` says how its sessions keep those, by default as the precision has them.

    With `expert_slots` that many routed experts are held at a time and read when they are needed; otherwise all are in
    memory. With `wide_rows` there is room for steps of that many rows as well, which read a layer's experts once. What
    the steps want of experts goes to the `recorder`, if any.
    """
    config = found.config
    fast = precision is Precision.FAST
    layout = state_layout(config, latent_type(latents, fast=fast))
    weights = load_weights(config, found.files, found.prefix, trunk, progress)
    experts: Experts | None = None
    if config.moe is not None:
        experts = open_experts(config, found.files, found.prefix, expert_slots)
        if recorder is not None:
            experts = TracedExperts(experts, recorder)
    model = KimiModel(
        config,
        weights,
        experts,
        layout,
        max_rows=max_rows,
        wide_rows=wide_rows,
        fast=fast,
        trunk=trunk,
        looks_ahead=expert_slots is not None,
    )
    return LoadedModel(model, layout, _fingerprint(found, precision, trunk, layout))


def _fingerprint(found: FoundModel, precision: Precision, trunk: Trunk, layout: StateLayout) -> Fingerprint:
    config = found.config
    return Fingerprint(
        config=blake3(config.raw.encode()).hexdigest(),
        tokenizer="none" if found.tokenizer is None else found.tokenizer.fingerprint(),
        chat_format=chat_format_id(config.family.value) or "none",
        precision=precision.value,
        trunk=trunk.value,
        latents=layout.latent_type.value,
        experts_per_token=0 if config.moe is None else config.moe.experts_per_token,
        state_layout=layout.describe(),
        weights=_weights(found),
        build=build_id(),
        simd=chosen_path().value,
    )


def _weights(found: FoundModel) -> str:
    """The identity of the weights; a model packed as it was stored has that of the original, whose states it shares."""
    if found.packed is not None and found.packed.manifest.experts == AS_STORED:
        return found.packed.manifest.source_weights
    return weight_identity(found.files)
