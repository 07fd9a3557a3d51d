"""The makers of small random models: complete by the loader's own rules, and the same every time."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from serai.runtime.bench.random_weights import to_bf16
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, TINY_MODELS, TinyModel, cached_tiny_model, write_tiny_model
from serai.runtime.bench.write_checkpoint import StoredTensor, write_checkpoint
from serai.runtime.models.config import ModelFamily, load_config
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.tensor_check import check_tensors
from serai.runtime.text.tokenizer import Tokenizer
from tests.runtime.odd_models import odd_shapes

EVERY_SHAPE = TINY_MODELS | odd_shapes()


def file_hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("shape", EVERY_SHAPE.values(), ids=EVERY_SHAPE.keys())
def test_every_shape_is_a_complete_checkpoint(shape: TinyModel, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, shape, seed=1)
    config = load_config(tmp_path)
    with CheckpointFiles.open(tmp_path) as files:
        check_tensors(config, files)
    assert config.family is shape.family
    assert Tokenizer.present(tmp_path) == (shape.vocab >= 512)


@pytest.mark.parametrize("family", ModelFamily)
def test_the_tokenizer_has_the_control_tokens_of_its_family_and_reads_any_text(
    family: ModelFamily, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, TINY_MODELS[family.value])
    config = load_config(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, config.vocab_size)
    stop = {"kimi_k3": "<|end_of_msg|>", "kimi_linear": "<|im_end|>"}[family.value]
    assert config.eos_ids == (tokenizer.token_id(stop),)
    assert config.bos_id == tokenizer.token_id("[BOS]")
    text = "Zwölf Kamele 🐪 und 商队; <|im_end|> is only text here.\x00\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < config.vocab_size - 256
    assert len(tokenizer.encode("The road behind them is the same road.")) < 12, "it was trained"


def test_the_same_arguments_give_the_same_files_in_every_process(tmp_path: Path) -> None:
    small = replace(TINY_K3, layers=2, attention_layers=(2,), experts=4)
    write_tiny_model(tmp_path / "here", small, seed=3)
    script = (
        "import sys; from dataclasses import replace; from pathlib import Path;"
        "from serai.runtime.bench.tiny import TINY_K3, write_tiny_model;"
        "write_tiny_model(Path(sys.argv[1]), replace(TINY_K3, layers=2, attention_layers=(2,), experts=4), seed=3)"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "there")],
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        cwd=tmp_path,
        timeout=60,
    )
    assert file_hashes(tmp_path / "here") == file_hashes(tmp_path / "there")
    write_tiny_model(tmp_path / "other", small, seed=4)
    assert file_hashes(tmp_path / "other")["model.safetensors"] != file_hashes(tmp_path / "here")["model.safetensors"]


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "one", TINY_LINEAR)
    write_tiny_model(tmp_path / "many", TINY_LINEAR, shards=4)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 4
    with CheckpointFiles.open(tmp_path / "one") as one, CheckpointFiles.open(tmp_path / "many") as many:
        assert one.tensors.keys() == many.tensors.keys()
        for name in one.tensors:
            np.testing.assert_array_equal(one.read(name), many.read(name), err_msg=name)


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    made: dict[str, NDArray[Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([[7, 8]], dtype=np.uint8),
    }
    tensors = {"a": StoredTensor("F32", (2, 3)), "b": StoredTensor("U8", (1, 2))}
    written = write_checkpoint(tmp_path, tensors, lambda name, _: made[name])
    assert written == (tmp_path / "model.safetensors").stat().st_size
    for name, values in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(values, made[name])


def test_a_maker_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a was made as float32 \(3,\), not as F32 \(2,\)"):
        write_checkpoint(tmp_path, {"a": StoredTensor("F32", (2,))}, lambda *_: np.zeros(3, np.float32))


def test_rounding_to_bfloat16_goes_to_the_nearest_and_ties_to_even() -> None:
    one, step = 1.0, 2.0**-7  # neighbours of 1 in bfloat16
    values = np.array([one, one + step / 2, one + 1.5 * step, one + 0.51 * step, -2.5], dtype=np.float32)
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC020]


def test_padding_of_the_decay_rates_is_zero(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TINY_K3)
    with CheckpointFiles.open(tmp_path) as files:
        a_log = files.read_float32("language_model.model.layers.0.self_attn.A_log")
    assert a_log.shape == (8,)
    assert (a_log[:4] > 0).all()
    assert not a_log[4:].any()


def test_a_cached_model_is_made_once_and_never_half(tmp_path: Path) -> None:
    small = replace(TINY_LINEAR, layers=1, attention_layers=())
    folder = cached_tiny_model(tmp_path, small)
    made_ns = (folder / "model.safetensors").stat().st_mtime_ns
    assert cached_tiny_model(tmp_path, small) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made_ns

    other = replace(small, hidden=64)
    expected = cached_tiny_model(tmp_path / "elsewhere", other).name
    (tmp_path / f"{expected}.unfinished").mkdir()
    (tmp_path / f"{expected}.unfinished" / "config.json").write_text("cut")
    load_config(cached_tiny_model(tmp_path, other))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, expected, "elsewhere"])
