"""A checkpoint in Kimi K3's layout as the GGUF file that llama.cpp reads, written with PyPI's `gguf`.

Every tensor has the type that serai holds it in with `trunk="q8"`: MXFP4 experts as they are, projections in Q8_0, the
gates, the embedding and MLA's two small matrices a head in bfloat16 (llama.cpp's own converter makes Q8_0 of them),
the router, norms and convolutions in float32. Or everything
in float32, to see whether both compute the same function. The file has no vocabulary: it is fed token ids.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench.report import BenchFailed
from serai.runtime.models.config import ExpertFormat, LayerKind, ModelConfig, ModelFamily, MoeConfig
from serai.runtime.models.open_model import find_model
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.tensor_table import EMBEDDING, decay_per_head, find_prefix, head_name, trunk_tensors
from serai.runtime.models.trunk import Held, Trunk

RECIPE = 2
"""Part of a file's name; goes up when the same checkpoint begins to give another file."""

ARCHITECTURE = "kimi-k3"
_F32, _BF16, _Q8_0, _MXFP4 = (gguf.GGMLQuantizationType[name] for name in ("F32", "BF16", "Q8_0", "MXFP4"))
_MXFP4_BLOCK = 32
_ROWS_AT_ONCE = 8192
_HEADER_BYTES = 1 << 20
"""More than the keys and names of any model written here take."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the file: its logical shape, its type, and what makes its values."""

    name: str
    shape: tuple[int, ...]
    kind: Any
    make: Callable[[], NDArray[Any]]
    rounds_from: Callable[[], NDArray[np.float32]] | None = None
    """What gives the values before rounding, of a tensor whose type loses some."""

    def exact(self) -> NDArray[Any]:
        """The values as the checkpoint has them: float32, or of this type."""
        return self.make() if self.rounds_from is None else self.rounds_from()

    @property
    def byte_shape(self) -> tuple[int, ...]:
        block, nbytes = gguf.GGML_QUANT_SIZES[self.kind]
        return (*self.shape[:-1], self.shape[-1] // block * nbytes)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.byte_shape))


def cached_gguf(folder: Path, tell: Callable[[str], None]) -> Path:
    """The checkpoint in `folder` as a GGUF file beside it; written now unless an earlier call has. Never half written.

    Raises `BenchFailed` as `write_gguf` does.
    """
    kept = folder.with_name(f"{folder.name}-{RECIPE}.gguf")
    if not kept.exists():
        tell("the same as GGUF")
        unfinished = kept.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)  # of a process that was killed
        found = find_model(folder)
        with closing(found.files):
            write_gguf(found.config, found.files, unfinished)
        unfinished.rename(kept)
    return kept


def write_gguf(config: ModelConfig, files: CheckpointFiles, path: Path, *, in_float32: bool = False) -> int:
    """Write the file and give its bytes; what was written of it is removed when that fails.

    `in_float32` widens every tensor, which changes no value.

    Raises `BenchFailed` for a model that is not K3 with MXFP4 experts, and when the disk has no room for the file.
    """
    is_k3 = config.family is ModelFamily.KIMI_K3 and config.expert_format is ExpertFormat.MXFP4
    if not is_k3 or config.moe is None or config.activation.situ_beta == 0:
        raise BenchFailed("only a Kimi K3 with MXFP4 experts is written as a GGUF file")
    tensors = list(_Source(config, config.moe, files).tensors())
    if in_float32:
        tensors = [_widened(tensor) for tensor in tensors]
    needed = sum(tensor.nbytes for tensor in tensors) + _HEADER_BYTES
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise BenchFailed(
            f"the GGUF file takes {needed:,} bytes in {path.parent}, where {free:,} are free; name another --dir"
        )
    try:
        with closing(gguf.GGUFWriter(path, ARCHITECTURE)) as writer:
            _describe(writer, config, config.moe)
            for tensor in tensors:
                shape, kind = tensor.byte_shape, tensor.kind
                writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), tensor.nbytes, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                values = np.ascontiguousarray(tensor.make())
                writer.write_tensor_data(values.reshape(-1).view(np.uint8))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def _widened(tensor: _Tensor) -> _Tensor:
    def make() -> NDArray[np.float32]:
        values = tensor.exact()
        return values if values.dtype == np.float32 else gguf.quants.dequantize(values, tensor.kind)

    return _Tensor(tensor.name, tensor.shape, _F32, make)


def _describe(writer: Any, config: ModelConfig, moe: MoeConfig) -> None:
    """The keys llama.cpp's loader of this architecture asks for."""
    kda, mla = config.kda, config.mla
    numbers = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.dense_intermediate,
        "attention.head_count": mla.heads,
        "attention.q_lora_rank": mla.q_lora_rank,
        "attention.kv_lora_rank": mla.kv_lora_rank,
        "attention.key_length": mla.latent_width,
        "attention.value_length": mla.kv_lora_rank,
        "attention.key_length_mla": mla.query_dim,
        "attention.value_length_mla": mla.v_dim,
        "rope.dimension_count": mla.rope_dim,
        "ssm.conv_kernel": kda.conv_kernel,
        "kda.head_dim": kda.head_dim,
        "expert_count": moe.experts,
        "expert_used_count": moe.experts_per_token,
        "expert_shared_count": moe.shared_experts,
        "expert_feed_forward_length": moe.inner,
        "expert_latent_length": moe.latent if moe.has_latent else None,
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "leading_dense_block_count": config.layer_is_moe.index(True),
        "attn_res.block_size": config.attn_res_block_size,
    }
    fractions = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "kda.gate_lower_bound": kda.gate_lower_bound,
        "expert_weights_scale": moe.scaling,
        "activation.situ_beta": config.activation.situ_beta,
        "activation.situ_linear_beta": config.activation.situ_linear_beta or 0.0,
    }
    for name, number in numbers.items():
        if number is not None:
            writer.add_uint32(f"{ARCHITECTURE}.{name}", number)
    for name, fraction in fractions.items():
        if fraction is not None:
            writer.add_float32(f"{ARCHITECTURE}.{name}", fraction)
    writer.add_bool(f"{ARCHITECTURE}.expert_weights_norm", moe.renormalize)
    # A layer without key heads is a recurrent one.
    kinds = [int(kind is LayerKind.MLA) for kind in config.layer_kinds]
    writer.add_array(f"{ARCHITECTURE}.attention.head_count_kv", kinds)
    writer.add_tokenizer_model("no_vocab")


class _Source:
    """The checkpoint's tensors under llama.cpp's names."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, files: CheckpointFiles) -> None:
        self._config, self._moe, self._files = config, moe, files
        self._prefix = find_prefix(config, files.tensors)
        self._specs = trunk_tensors(config)

    def tensors(self) -> Iterator[_Tensor]:
        yield self._matrix("token_embd.weight", EMBEDDING)
        for layer, kind in enumerate(self._config.layer_kinds):
            name, block = f"model.layers.{layer}.", f"blk.{layer}."
            yield self._vector(block + "attn_norm.weight", name + "input_layernorm.weight")
            yield self._vector(block + "ffn_norm.weight", name + "post_attention_layernorm.weight")
            yield self._mixing(block + "attn_res_score.weight", name + "self_attention_res")
            yield self._mixing(block + "ffn_res_score.weight", name + "mlp_res")
            yield from (self._kda if kind is LayerKind.KDA else self._mla)(block, name + "self_attn.")
            if self._config.layer_is_moe[layer]:
                yield from self._experts(block, name + "block_sparse_moe.")
            else:
                yield from self._mlp(block, "", name + "mlp.")
        yield self._vector("output_norm.weight", "model.norm.weight")
        yield self._mixing("output_res_score.weight", "model.output_attn_res")
        yield self._matrix("output.weight", head_name(self._config))

    def _kda(self, block: str, name: str) -> Iterator[_Tensor]:
        kda = self._config.kda
        for one in "qkv":
            yield self._matrix(f"{block}attn_{one}.weight", f"{name}{one}_proj.weight")
            shape = (1, kda.width, 1, kda.conv_kernel)
            yield self._floats(f"{block}ssm_conv1d_{one}.weight", shape, f"{name}{one}_conv1d.weight")
        for new, old in {
            "ssm_f_a": "f_a_proj",
            "ssm_f_b": "f_b_proj",
            "ssm_beta": "b_proj",
            "ssm_g": "g_proj",
            "attn_output": "o_proj",
        }.items():
            yield self._matrix(f"{block}{new}.weight", f"{name}{old}.weight")

        def rates() -> NDArray[np.float32]:
            a_log: NDArray[np.float32] = decay_per_head(self._read(name + "A_log"), kda.heads)
            return -np.exp(a_log)

        yield _Tensor(block + "ssm_a", (kda.heads,), _F32, rates)
        yield self._vector(block + "ssm_dt.bias", name + "dt_bias")
        yield self._vector(block + "ssm_norm.weight", name + "o_norm.weight")

    def _mla(self, block: str, name: str) -> Iterator[_Tensor]:
        mla = self._config.mla
        for new, old in {
            "attn_q_a": "q_a_proj",
            "attn_q_b": "q_b_proj",
            "attn_kv_a_mqa": "kv_a_proj_with_mqa",
            "attn_gate": "g_proj",
            "attn_output": "o_proj",
        }.items():
            yield self._matrix(f"{block}{new}.weight", f"{name}{old}.weight")
        yield self._vector(block + "attn_q_a_norm.weight", name + "q_a_layernorm.weight")
        yield self._vector(block + "attn_kv_a_norm.weight", name + "kv_a_layernorm.weight")

        def up() -> NDArray[np.float32]:
            stored = self._read(name + "kv_b_proj.weight")
            return stored.reshape(mla.heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)

        def keys() -> NDArray[np.float32]:
            return up()[:, : mla.nope_dim].transpose(0, 2, 1)

        def values() -> NDArray[np.float32]:
            return up()[:, mla.nope_dim :]

        shape = (mla.heads, mla.kv_lora_rank, mla.nope_dim)
        yield _Tensor(block + "attn_k_b.weight", shape, _BF16, lambda: _bf16(keys()), keys)
        shape = (mla.heads, mla.v_dim, mla.kv_lora_rank)
        yield _Tensor(block + "attn_v_b.weight", shape, _BF16, lambda: _bf16(values()), values)

    def _experts(self, block: str, name: str) -> Iterator[_Tensor]:
        moe, hidden = self._moe, self._config.hidden_size
        yield self._floats(block + "ffn_gate_inp.weight", (moe.experts, hidden), name + "gate.weight")
        yield self._vector(block + "exp_probs_b.bias", name + "gate.e_score_correction_bias")
        if moe.has_latent:
            yield self._matrix(block + "ffn_routed_down.weight", name + "routed_expert_down_proj.weight")
            yield self._matrix(block + "ffn_routed_up.weight", name + "routed_expert_up_proj.weight")
        if moe.latent_norm:
            yield self._vector(block + "ffn_routed_norm.weight", name + "routed_expert_norm.weight")
        up, down = (moe.experts, moe.inner, moe.latent), (moe.experts, moe.latent, moe.inner)
        for new, part, shape in (("gate", "w1", up), ("up", "w3", up), ("down", "w2", down)):
            yield _Tensor(f"{block}ffn_{new}_exps.weight", shape, _MXFP4, self._packed(name, part))
        if moe.shared_experts:
            yield from self._mlp(block, "_shexp", name + "shared_experts.")

    def _mlp(self, block: str, suffix: str, name: str) -> Iterator[_Tensor]:
        for one in ("gate", "up", "down"):
            yield self._matrix(f"{block}ffn_{one}{suffix}.weight", f"{name}{one}_proj.weight")

    def _packed(self, name: str, part: str) -> Callable[[], NDArray[Any]]:
        def make() -> NDArray[Any]:
            stems = [f"{self._prefix}{name}experts.{expert}.{part}.weight" for expert in range(self._moe.experts)]
            return np.stack(
                [mxfp4_blocks(self._files.read(f"{stem}_packed"), self._files.read(f"{stem}_scale")) for stem in stems]
            )

        return make

    def _read(self, name: str) -> NDArray[np.float32]:
        return self._files.read_float32(self._prefix + name)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files.info(self._prefix + name).shape)

    def _matrix(self, new: str, old: str) -> _Tensor:
        if Trunk.Q8.held(self._specs[old]) is Held.Q8:
            return _Tensor(new, self._shape(old), _Q8_0, lambda: _q8_0(self._read(old)), lambda: self._read(old))
        return _Tensor(new, self._shape(old), _BF16, lambda: _bf16(self._read(old)), lambda: self._read(old))

    def _floats(self, new: str, shape: tuple[int, ...], old: str) -> _Tensor:
        return _Tensor(new, shape, _F32, lambda: self._read(old))

    def _vector(self, new: str, old: str) -> _Tensor:
        return self._floats(new, (int(np.prod(self._shape(old))),), old)

    def _mixing(self, new: str, old: str) -> _Tensor:
        def make() -> NDArray[np.float32]:
            return self._read(f"{old}_norm.weight").reshape(-1) * self._read(f"{old}_proj.weight").reshape(-1)

        return _Tensor(new, (self._config.hidden_size,), _F32, make)


def _q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Q8_0 blocks of `[..., columns]` values: a float16 scale and 32 signed bytes each."""
    rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
    pieces = [gguf.quants.quantize(rows[at : at + _ROWS_AT_ONCE], _Q8_0) for at in range(0, len(rows), _ROWS_AT_ONCE)]
    return np.concatenate(pieces)


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of numbers that were bfloat16 before."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def mxfp4_blocks(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """llama.cpp's blocks of shipped MXFP4 weights, uint8 `[rows, columns/32 * 17]`; no value changes.

    `packed` `[rows, columns/2]` has the even column in the low nibble, `scales` `[rows, columns/32]` E8M0 bytes. A
    block is its scale, then 16 bytes with column j in the low nibble of byte j and column j + 16 in the high one.
    """
    rows, groups = scales.shape
    pairs = packed.reshape(rows, groups, 16)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows, groups, _MXFP4_BLOCK)
    out = np.empty((rows, groups, 17), np.uint8)
    out[..., 0] = scales
    out[..., 1:] = codes[..., :16] | codes[..., 16:] << 4
    return out.reshape(rows, -1)
