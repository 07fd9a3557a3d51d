"""Load an exported folder back into the training model (float32 parameters that hold the stored values)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .export import PREFIX
from .model import NanoConfig, NanoModel
from .quantise import dequantise_mxfp4


def read_config(folder: Path) -> NanoConfig:
    c = json.loads((folder / "config.json").read_text())["text_config"]
    linear = c["linear_attn_config"]
    same = set(NanoConfig.__dataclass_fields__) & set(c)
    return NanoConfig(
        **{name: c[name] for name in same},
        full_attn_layers=tuple(linear["full_attn_layers"]),
        num_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        conv_kernel=linear["short_conv_kernel_size"],
        gate_lower_bound=linear["gate_lower_bound"],
        beta=c["activation_situ_beta"],
        linear_beta=c["activation_situ_linear_beta"],
    )


def load_folder(folder: Path) -> NanoModel:
    """The model in evaluation mode; its experts hold their dequantised MXFP4 values."""
    model = NanoModel(read_config(folder))
    stored = load_file(str(folder / "model.safetensors"))

    def expert(name: str, index: int) -> Tensor:
        base, matrix = name.rsplit(".", 1)
        packed = stored[f"{PREFIX}{base}.{index}.{matrix}.weight_packed"]
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        return dequantise_mxfp4(codes, stored[f"{PREFIX}{base}.{index}.{matrix}.weight_scale"])

    state = {}
    for name, value in model.state_dict().items():
        if ".experts." in name:
            state[name] = torch.stack([expert(name, index) for index in range(value.shape[0])])
        else:
            state[name] = stored[PREFIX + name].float()
    model.load_state_dict(state)
    return model.eval()
