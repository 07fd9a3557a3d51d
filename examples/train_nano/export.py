"""Write a trained model as a Hugging Face folder: `python -m examples.train_nano.export RUN OUT`.

Layout and dtypes are those of the K3 release: prefix `language_model.`, BF16 trunk, MXFP4 experts (`weight_packed` with
two columns a byte, low nibble first, and `weight_scale`), F32 convolutions, A_log, dt_bias, o_norm and router bias.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .markup import SPECIAL_TOKENS
from .model import NanoConfig, NanoModel
from .quantise import GROUP, mxfp4

PREFIX = "language_model."
MAX_BYTES = 8_000_000
FLOAT32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")


def text_config(c: NanoConfig) -> dict[str, Any]:
    first_special = c.vocab_size - len(SPECIAL_TOKENS)
    ids = {token: first_special + i for i, token in enumerate(SPECIAL_TOKENS)}
    layers = range(1, c.num_hidden_layers + 1)
    return {
        "activation_situ_beta": c.beta,
        "activation_situ_linear_beta": c.linear_beta,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": c.attn_res_block_size,
        "bos_token_id": ids["[BOS]"],
        "dtype": "bfloat16",
        "eos_token_id": ids["<|end_of_msg|>"],
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "kv_lora_rank": c.kv_lora_rank,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": list(c.full_attn_layers),
            "gate_lower_bound": c.gate_lower_bound,
            "head_dim": c.kda_head_dim,
            "kda_layers": [i for i in layers if i not in c.full_attn_layers],
            "num_heads": c.num_heads,
            "short_conv_kernel_size": c.conv_kernel,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": c.moe_intermediate_size,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": c.num_heads,
        "num_expert_group": 1,
        "num_experts": c.num_experts,
        "num_experts_per_token": c.num_experts_per_token,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": c.num_shared_experts,
        "pad_token_id": ids["[PAD]"],
        "q_lora_rank": c.q_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "group_size": GROUP,
                        "num_bits": 4,
                        "strategy": "group",
                        "symmetric": True,
                        "type": "float",
                    },
                }
            },
            "format": "mxfp4-pack-quantized",
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "lm_head",
            ],
            "quant_method": "compressed-tensors",
        },
        "rms_norm_eps": c.rms_norm_eps,
        "routed_expert_hidden_size": c.routed_expert_hidden_size,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": c.v_head_dim,
        "vocab_size": c.vocab_size,
    }


def model_config(c: NanoConfig) -> dict[str, Any]:
    text = text_config(c)
    shared = {
        key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "tie_word_embeddings")
    }
    media = c.vocab_size - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index("<|media_pad|>")
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "media_placeholder_token_id": media,
        "model_type": "kimi_k3",
        "text_config": text,
        **shared,
    }


def tensors(model: NanoModel) -> dict[str, Tensor]:
    """Checkpoint name -> tensor in its stored dtype."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if ".experts." in name:
            base, matrix = name.rsplit(".", 1)
            codes, scales = mxfp4(value)
            packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
            for expert in range(value.shape[0]):
                out[f"{PREFIX}{base}.{expert}.{matrix}.weight_packed"] = packed[expert].contiguous()
                out[f"{PREFIX}{base}.{expert}.{matrix}.weight_scale"] = scales[expert].contiguous()
        elif name.endswith(FLOAT32):
            out[PREFIX + name] = value.float().contiguous()
        else:
            out[PREFIX + name] = value.to(torch.bfloat16).contiguous()
    return out


def rounded(model: NanoModel) -> None:
    """Round the trunk in place to what is stored; with `set_quantised(True)` the model then is the exported one."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if ".experts." not in name and not name.endswith(FLOAT32):
                value.copy_(value.to(torch.bfloat16).float())


def load_run(run: Path) -> tuple[NanoModel, dict[str, Any]]:
    state = torch.load(run / "state.pt", weights_only=True)
    model = NanoModel(NanoConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in state["config"].items()}))
    model.load_state_dict(state["model"])
    return model.eval(), state


def export(model: NanoModel, tokenizer_folder: Path, out: Path) -> int:
    """Write the folder and return its size in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors(model), str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the writer makes it private
    config = model_config(model.config)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    stop = config["eos_token_id"]
    first_special = model.config.vocab_size - len(SPECIAL_TOKENS)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "do_sample": False,
        "eos_token_id": [stop, first_special + SPECIAL_TOKENS.index("[EOS]")],
        "pad_token_id": config["pad_token_id"],
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer_folder / name).resolve() != (out / name).resolve():
            shutil.copyfile(tokenizer_folder / name, out / name)
    total = sum(f.stat().st_size for f in out.iterdir())
    if total > MAX_BYTES:
        raise ValueError(f"the exported folder has {total} bytes; it must not exceed {MAX_BYTES}")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    model, state = load_run(options.run)
    size = export(model, options.run, options.out)
    progress = f"step {state['step']}, {state['tokens'] / 1e6:.2f} M tokens, {state['spent_s']:.0f} s"
    print(f"{progress}: {size} bytes in {options.out}")


if __name__ == "__main__":
    main()
