"""A checkpoint of one model is refused by another of the same name and architecture, naming what differs."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from serai.runtime import open_runtime
from serai.runtime.bench.tiny import TINY_K3, write_tiny_model
from serai.runtime.errors import ModelMismatch
from serai.runtime.models.locate import BUILT_IN

pytestmark = pytest.mark.anyio

TOKENS = list(range(20))


def change_a_tensor(folder: Path) -> str:
    """Another value for each of one tensor's numbers, in the file as it lies there; the tensor's name."""
    file = next(iter(sorted(folder.glob("*.safetensors"))))
    data = bytearray(file.read_bytes())
    (header_bytes,) = struct.unpack("<Q", data[:8])
    tensors = json.loads(data[8 : 8 + header_bytes])
    name: str = next(name for name in sorted(tensors) if name.endswith("o_proj.weight"))
    start, end = (8 + header_bytes + offset for offset in tensors[name]["data_offsets"])
    data[start:end:2] = bytes(byte ^ 1 for byte in data[start:end:2])  # the last bit of each bfloat16
    file.write_bytes(data)
    return name


async def checkpoint(model: Path, store: Path) -> str:
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        session = await rt.session()
        await session.append(TOKENS)
        point = await session.pause()
    return point.id


async def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    """B57: one tensor of the folder was changed, by the last bit of its numbers; with it as it was, all is well."""
    model, store = tmp_path / "model", tmp_path / "store"
    write_tiny_model(model, TINY_K3)
    point = await checkpoint(model, store)
    kept = shutil.copytree(model, tmp_path / "kept")
    change_a_tensor(model)
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        for as_is in (False, True):
            with pytest.raises(ModelMismatch, match="weights") as caught:
                await rt.resume(point, as_is=as_is)
            assert caught.value.fields == ("weights",)
        assert rt.status().sessions == ()
        assert rt.counters.prefilled_tokens == 0
    shutil.rmtree(model)
    kept.rename(model)
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        assert (await rt.resume(point)).tokens().tolist() == TOKENS
        assert rt.counters.prefilled_tokens == 0


async def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """B57: two tokens of the vocabulary have changed places."""
    model, store = tmp_path / "nano", tmp_path / "store"
    shutil.copytree(BUILT_IN["nano"], model)
    point = await checkpoint(model, store)
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (name for name, number in vocabulary.items() if number in (40, 41))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer), "utf-8")
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        with pytest.raises(ModelMismatch, match="tokenizer") as caught:
            await rt.resume(point)
        assert caught.value.fields == ("tokenizer",)


async def test_another_precision_is_refused(tmp_path: Path) -> None:
    """B57: with it the latents of another type. (Pages of another size are no other model: `test_resuming`.)"""
    model, store = tmp_path / "model", tmp_path / "store"
    write_tiny_model(model, TINY_K3)
    point = await checkpoint(model, store)
    async with open_runtime(model, budget="1GiB", store=store, precision="exact") as rt:
        with pytest.raises(ModelMismatch, match="precision"):
            await rt.resume(point)
