"""Fewer experts a token, when asked: what that computes, what it takes, and that states know of it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from serai.runtime import open_runtime
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, TinyModel, write_tiny_model
from serai.runtime.checks.stepping import Stepper
from serai.runtime.cli.main import app
from serai.runtime.errors import BadParameter, ModelMismatch
from serai.runtime.memory.plan import plan_memory
from serai.runtime.models.config import parse_config
from serai.runtime.models.fewer_experts import with_experts_per_token
from serai.runtime.models.open_model import Precision, find_model, load_model
from serai.runtime.state import StatePool

TOKENS = np.random.default_rng(3).integers(0, 1000, 40).astype(np.int32)
runner = CliRunner()


def bits(folder: Path, experts_per_token: int | None, slots: int | None = None) -> bytes:
    found = find_model(folder, experts_per_token=experts_per_token)
    loaded = load_model(found, Precision.EXACT, max_rows=64, expert_slots=slots)
    stepper = Stepper(loaded, StatePool(loaded.layout, poison=True))
    made = stepper.ended(stepper.run(TOKENS))
    loaded.model.close()
    found.files.close()
    return made


@pytest.mark.parametrize("model", [TINY_K3, TINY_LINEAR], ids=["k3", "linear"])
def test_it_computes_what_a_model_configured_so_computes(tmp_path: Path, model: TinyModel) -> None:
    """The same weights under a config.json that says 2 are the definition, renormalisation and all; streamed too."""
    write_tiny_model(tmp_path / "four", model)
    write_tiny_model(tmp_path / "two", replace(model, experts_per_token=2))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("four", "two")]
    assert weights[0] == weights[1]
    expected = bits(tmp_path / "two", None)
    assert bits(tmp_path / "four", 2) == expected
    assert bits(tmp_path / "four", 2, slots=2) == expected
    assert bits(tmp_path / "four", None) == bits(tmp_path / "four", 4) != expected


def test_what_a_token_needs_shrinks_with_it() -> None:
    config = parse_config(TINY_K3.config())
    whole, half = (plan_memory(with_experts_per_token(config, count)) for count in (4, 2))
    assert (whole.experts_per_token, half.experts_per_token) == (4, 2)
    assert half.token_expert_bytes * 2 == whole.token_expert_bytes
    assert half.streaming_floor_bytes.bfloat16 < whole.streaming_floor_bytes.bfloat16
    assert half.experts_total_bytes == whole.experts_total_bytes


@pytest.mark.parametrize("wanted", [0, -1, 5, True, 2.0, "2"])
def test_a_number_that_can_not_be_is_one_sentence(wanted: object) -> None:
    told = f"experts_per_token is {wanted!r}, but must be a whole number from 1 to 4, the model's own"
    with pytest.raises(BadParameter, match=f"^{told}$"):
        with_experts_per_token(parse_config(TINY_K3.config()), wanted)  # type: ignore[arg-type]


def test_a_model_without_experts_has_none_to_leave_out() -> None:
    dense = parse_config(replace(TINY_LINEAR, experts=0).config())
    assert with_experts_per_token(dense, None) is dense
    with pytest.raises(BadParameter, match="has no routed experts; leave it out"):
        with_experts_per_token(dense, 1)


@pytest.mark.anyio
async def test_a_state_of_fewer_experts_is_not_taken_for_the_whole_models(tmp_path: Path) -> None:
    """The fingerprint says so: resuming with another number is refused by name, with the same one it goes
    on, and naming the model's own number is the same as leaving it out."""
    write_tiny_model(tmp_path / "m", TINY_K3)
    store = tmp_path / "store"
    async with open_runtime(tmp_path / "m", budget="1GiB", store=store, experts_per_token=2) as rt:
        session = await rt.session()
        await session.append(TOKENS.tolist())
        few = await session.pause()
    async with open_runtime(tmp_path / "m", budget="1GiB", store=store) as rt:
        with pytest.raises(ModelMismatch, match="experts_per_token"):
            await rt.resume(few)
        session = await rt.session()
        assert (await session.append(TOKENS.tolist())).reused == 0
        whole = await session.pause()
    async with open_runtime(tmp_path / "m", budget="1GiB", store=store, experts_per_token=4) as rt:
        assert (await rt.resume(whole)).position == len(TOKENS)
    async with open_runtime(tmp_path / "m", budget="1GiB", store=store, experts_per_token=2) as rt:
        assert (await rt.resume(few)).position == len(TOKENS)


def test_every_command_that_runs_a_model_takes_it(tmp_path: Path) -> None:
    """One that can't be is refused by each before anything is loaded; `eval` and `plan` say what they ran with."""
    write_tiny_model(tmp_path / "m", TINY_K3)
    model, tokens, out = str(tmp_path / "m"), tmp_path / "t.npy", tmp_path / "o.npz"
    np.save(tokens, TOKENS)
    evaluation = ["eval", model, "--tokens", str(tokens), "--out", str(out), "--greedy", "0", "--json"]
    store = ["--store", str(tmp_path / "store")]
    commands = [evaluation, ["plan", model], ["selfcheck", model], ["run", model, "x", *store], ["chat", model, *store]]
    for command in [*commands, ["serve", model, "--port", "0", *store]]:
        refused = runner.invoke(app, [*command, "--experts-per-token", "9"])
        assert refused.exit_code == 1, command
        assert "experts_per_token is 9, but must be a whole number from 1 to 4" in refused.stderr, command
    result = runner.invoke(app, [*evaluation, "--experts-per-token", "3"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["experts_per_token"] == 3
    planned = runner.invoke(app, ["plan", model, "--experts-per-token", "3", "--json"])
    assert json.loads(planned.stdout)["experts_per_token"] == 3


@pytest.mark.parametrize("command", ["run", "chat"])
def test_the_command_to_resume_says_it_again(command: str, tmp_path: Path) -> None:
    arguments = [command, "nano", "--store", str(tmp_path), "--experts-per-token", "1", "--max-tokens", "2"]
    result = runner.invoke(app, arguments + (["Mira"] if command == "run" else []), input="Mira\n")
    assert result.exit_code == 0, result.stderr
    assert "--experts-per-token 1" in result.stderr
