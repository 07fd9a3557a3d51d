"""A model's tensors in the kernels' layout: read once from the checkpoint, never changed after.

Projections of the same input are laid side by side in one matrix, so that a layer reads its input once; `columns` of
each group say where a piece starts in the product. A head tied to the embedding is the same matrix, held once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels.matrix import LANES, Matrix, concat, pack, pack_heads, pack_q4, pack_q8
from serai.runtime.models.config import LayerKind, ModelConfig
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.tensor_table import trunk_tensors
from serai.runtime.models.trunk import Held, Trunk


@dataclass(frozen=True, slots=True)
class Group:
    """Several projections of one input; piece `name` of the product starts at `columns[name]`.

    They are one matrix, or two where only some are held in 8 bits, each with the column where its product starts.
    """

    matrices: tuple[tuple[Matrix, int], ...]
    columns: Mapping[str, int]

    @property
    def width(self) -> int:
        """Columns of the product, padding between pieces included."""
        matrix, start = self.matrices[-1]
        return start + matrix.blocks * LANES


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """One Kimi Delta Attention layer. `conv` is `[3 (q, k, v), 4 taps, heads * head_dim]`, oldest tap first;
    `decay_rate` is exp(A_log), `[heads]`; `gate` is the second factor of a low-rank output gate."""

    projections: Group
    decay: Matrix
    gate: Matrix | None
    conv: NDArray[np.float32]
    decay_rate: NDArray[np.float32]
    dt_bias: NDArray[np.float32]
    o_norm: NDArray[np.float32]
    out: Matrix


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """One latent attention layer in absorbed form: `key_up` takes a head's query to latent space (`[kv_lora, nope]` a
    head), `value_up` takes a head's weighted latents to its values (`[v, kv_lora]` a head)."""

    projections: Group
    q_norm: NDArray[np.float32] | None
    q_b: Matrix | None
    kv_norm: NDArray[np.float32]
    key_up: Matrix
    value_up: Matrix
    out: Matrix


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """A plain gated feed-forward layer."""

    gate_up: Group
    down: Matrix


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A mixture-of-experts layer but for its routed experts, which `runtime/experts` holds or reads. The router is a
    matrix of its own, so that it can be asked ahead; `projections` are what else reads the same input, if anything."""

    router: Matrix
    bias: NDArray[np.float32]
    projections: Group | None
    latent_norm: NDArray[np.float32] | None
    latent_up: Matrix | None
    shared_down: Matrix | None


@dataclass(frozen=True, slots=True)
class Mixing:
    """Attention Residuals before a sub-layer: the vector that scores each block (`norm.weight * proj.weight`)."""

    score: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: what mixes tokens, what works on each, and the norms (and mixings) before both."""

    input_norm: NDArray[np.float32]
    post_norm: NDArray[np.float32]
    attention_mixing: Mixing | None
    ffn_mixing: Mixing | None
    attention: KdaWeights | MlaWeights
    ffn: DenseWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    norm: NDArray[np.float32]
    output_mixing: Mixing | None
    head: Matrix

    @property
    def bytes(self) -> int:
        """Bytes of the trunk: everything but the routed experts, a tied head counted once."""
        seen: dict[int, int] = {}
        _measure(self, seen)
        return sum(seen.values())


_PACKED = {Held.MXFP4: pack_q4, Held.Q8: pack_q8, Held.STORED: pack}


class _Reader:
    """Tensors of a checkpoint by their name without the family's prefix."""

    def __init__(self, config: ModelConfig, files: CheckpointFiles, prefix: str, trunk: Trunk) -> None:
        self._files = files
        self._prefix = prefix
        self._held = {name: trunk.held(spec) for name, spec in trunk_tensors(config).items()}

    def raw(self, name: str) -> NDArray[Any]:
        """As stored: float32, or bfloat16 bits in uint16, or bytes."""
        return self._files.read(self._prefix + name)

    def vector(self, name: str) -> NDArray[np.float32]:
        """Widened to float32 and flattened."""
        return np.ascontiguousarray(self._files.read_float32(self._prefix + name).reshape(-1))

    def group(self, parts: Mapping[str, str]) -> Group:
        """Matrices by piece name, laid side by side: first those that are quantised, then the others."""
        matrices: list[tuple[Matrix, int]] = []
        columns: dict[str, int] = {}
        width = 0
        for held, packed in _PACKED.items():
            some = {piece: name for piece, name in parts.items() if self._held[name] is held}
            if some:
                matrix, starts = concat([self.raw(name) for name in some.values()], packed=packed)
                matrices.append((matrix, width))
                columns |= {piece: width + start for piece, start in zip(some, starts, strict=True)}
                width += matrix.blocks * LANES
        return Group(tuple(matrices), columns)

    def matrix(self, name: str) -> Matrix:
        return _PACKED[self._held[name]](self.raw(name))


def load_weights(
    config: ModelConfig,
    files: CheckpointFiles,
    prefix: str,
    trunk: Trunk = Trunk.AS_STORED,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Read and lay out the trunk; the tensors have been checked against the configuration before.

    `progress(done, total)` is called after each layer.
    """
    read = _Reader(config, files, prefix, trunk)
    embedding = read.matrix("model.embed_tokens.weight")
    layers = []
    for index in range(config.num_layers):
        layers.append(_layer(config, read, index))
        if progress is not None:
            progress(index + 1, config.num_layers)
    mixed = config.attn_res_block_size > 0
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=read.vector("model.norm.weight"),
        output_mixing=_mixing(read, "model.output_attn_res") if mixed else None,
        head=embedding if config.tie_word_embeddings else read.matrix("lm_head.weight"),
    )


def _layer(config: ModelConfig, read: _Reader, index: int) -> LayerWeights:
    name = f"model.layers.{index}."
    kda = config.layer_kinds[index] is LayerKind.KDA
    mixed = config.attn_res_block_size > 0
    return LayerWeights(
        input_norm=read.vector(name + "input_layernorm.weight"),
        post_norm=read.vector(name + "post_attention_layernorm.weight"),
        attention_mixing=_mixing(read, name + "self_attention_res") if mixed else None,
        ffn_mixing=_mixing(read, name + "mlp_res") if mixed else None,
        attention=_kda(config, read, name + "self_attn.") if kda else _mla(config, read, name + "self_attn."),
        ffn=_moe(config, read, name + "block_sparse_moe.")
        if config.layer_is_moe[index]
        else _dense(read, name + "mlp."),
    )


def _mixing(read: _Reader, name: str) -> Mixing:
    return Mixing(read.vector(name + "_norm.weight") * read.vector(name + "_proj.weight"))


def _kda(config: ModelConfig, read: _Reader, name: str) -> KdaWeights:
    kda = config.kda
    gate = "g_proj" if kda.full_rank_gate else "g_a_proj"
    parts = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": gate, "decay": "f_a_proj", "beta": "b_proj"}
    # The file holds a filter per channel; the kernels walk channels, so a tap's weights lie side by side.
    taps = [read.vector(f"{name}{one}_conv1d.weight").reshape(kda.width, kda.conv_kernel).T for one in "qkv"]
    return KdaWeights(
        projections=read.group({piece: f"{name}{part}.weight" for piece, part in parts.items()}),
        decay=read.matrix(name + "f_b_proj.weight"),
        gate=None if kda.full_rank_gate else read.matrix(name + "g_b_proj.weight"),
        conv=np.ascontiguousarray(np.stack(taps)),
        decay_rate=np.exp(read.vector(name + "A_log")[: kda.heads]),  # K3 pads A_log past the head count
        dt_bias=read.vector(name + "dt_bias"),
        o_norm=read.vector(name + "o_norm.weight"),
        out=read.matrix(name + "o_proj.weight"),
    )


def _mla(config: ModelConfig, read: _Reader, name: str) -> MlaWeights:
    mla = config.mla
    low_rank = mla.q_lora_rank is not None
    parts = {"q": "q_a_proj" if low_rank else "q_proj", "latent": "kv_a_proj_with_mqa"}
    if mla.output_gate:
        parts["gate"] = "g_proj"
    up = read.raw(name + "kv_b_proj.weight").reshape(mla.heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
    return MlaWeights(
        projections=read.group({piece: f"{name}{part}.weight" for piece, part in parts.items()}),
        q_norm=read.vector(name + "q_a_layernorm.weight") if low_rank else None,
        q_b=read.matrix(name + "q_b_proj.weight") if low_rank else None,
        kv_norm=read.vector(name + "kv_a_layernorm.weight"),
        key_up=pack_heads(np.ascontiguousarray(up[:, : mla.nope_dim].transpose(0, 2, 1))),
        value_up=pack_heads(np.ascontiguousarray(up[:, mla.nope_dim :])),
        out=read.matrix(name + "o_proj.weight"),
    )


def _dense(read: _Reader, name: str) -> DenseWeights:
    return DenseWeights(
        gate_up=read.group({"gate": name + "gate_proj.weight", "up": name + "up_proj.weight"}),
        down=read.matrix(name + "down_proj.weight"),
    )


def _moe(config: ModelConfig, read: _Reader, name: str) -> MoeWeights:
    moe = config.moe
    if moe is None:
        raise AssertionError("a layer is a mixture of experts only when the configuration has experts")
    parts = {}
    if moe.has_latent:
        parts["latent"] = name + "routed_expert_down_proj.weight"
    if moe.shared_experts:
        parts["shared_gate"] = name + "shared_experts.gate_proj.weight"
        parts["shared_up"] = name + "shared_experts.up_proj.weight"
    return MoeWeights(
        router=read.matrix(name + "gate.weight"),
        bias=read.vector(name + "gate.e_score_correction_bias"),
        projections=read.group(parts) if parts else None,
        latent_norm=read.vector(name + "routed_expert_norm.weight") if moe.latent_norm else None,
        latent_up=read.matrix(name + "routed_expert_up_proj.weight") if moe.has_latent else None,
        shared_down=read.matrix(name + "shared_experts.down_proj.weight") if moe.shared_experts else None,
    )


def _measure(value: Any, seen: dict[int, int]) -> None:
    """Collect the bytes of every distinct array under a weights value."""
    if isinstance(value, np.ndarray):
        seen[value.ctypes.data] = value.nbytes
    elif isinstance(value, tuple):
        for item in value:
            _measure(item, seen)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            _measure(getattr(value, name), seen)
