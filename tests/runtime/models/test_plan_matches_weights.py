"""The plan's arithmetic and the loader agree to the byte, for every way a checkpoint can be stored."""

from pathlib import Path

import pytest

from serai.runtime.memory.plan import plan_memory
from serai.runtime.models.config import parse_config
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.tensor_table import find_prefix
from serai.runtime.models.trunk import Trunk
from serai.runtime.models.weights import load_weights
from tests.runtime.models.small_checkpoints import changed, k3_raw, linear_raw, random_tensors, write_tensors

CASES = {
    "kimi_linear in bfloat16": linear_raw(),
    "kimi_linear in float32": changed(linear_raw(), "dtype", "float32"),
    "kimi_linear, tied": changed(linear_raw(), "tie_word_embeddings", True),
    "kimi_linear without experts": changed(linear_raw(), "num_experts", None),
    "k3 with packed experts": k3_raw(),
    "k3 with plain experts": changed(k3_raw(), "text_config.quantization_config", ...),
}


@pytest.mark.parametrize("trunk", Trunk)
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_takes_what_was_planned(tmp_path: Path, case: str, trunk: Trunk) -> None:
    """B26 among them: a tied embedding is held once."""
    config = parse_config(CASES[case])
    write_tensors(tmp_path / "model.safetensors", random_tensors(config))
    with CheckpointFiles.open(tmp_path) as files:
        plan = plan_memory(config, files, trunk=trunk)
        weights = load_weights(config, files, find_prefix(config, files.tensors), trunk)
    assert weights.bytes == plan.trunk_bytes
