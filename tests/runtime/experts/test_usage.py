"""What a run leaves for the next one and for the simulator: the experts used most, and which each step wanted."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from serai.runtime import SamplingParams, open_runtime
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, write_tiny_model
from serai.runtime.cli.main import app
from serai.runtime.errors import BadParameter
from serai.runtime.experts.trace import RoutingTrace
from serai.runtime.experts.usage import USAGE_NAME, load_usage, save_usage
from serai.runtime.memory.plan import plan_memory
from serai.runtime.models.config import parse_config
from serai.runtime.models.scratch import kernel_scratch_bytes
from serai.runtime.opening import LEAST_CONTEXT_TOKENS
from serai.runtime.runtime import Runtime
from serai.runtime.scheduler import Limits
from serai.runtime.status import ExpertStatus

pytestmark = pytest.mark.anyio

TOKENS = np.random.default_rng(8).integers(0, 1000, 12).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "m", TINY_K3)
    return tmp_path / "m"


def budget() -> int:
    """Holds about half of the experts."""
    config, rows = parse_config(TINY_K3.config()), Limits().step_rows
    plan = plan_memory(
        config,
        context_tokens=LEAST_CONTEXT_TOKENS,
        step_rows=rows,
        kernel_scratch_bytes=kernel_scratch_bytes(config, rows, fast=True),
    )
    return (plan.streaming_floor_bytes.bfloat16 + plan.floor_bytes.bfloat16) // 2


def experts(rt: Runtime) -> ExpertStatus:
    found = rt.status().experts
    assert found is not None
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def says(rt: Runtime) -> list[int]:
    session = await rt.session()
    await session.append(TOKENS)
    return list((await session.generate(GREEDY).collect()).tokens)


async def known_at_once(rt: Runtime) -> int:
    """Experts of a first token that were there, and not because they had just been guessed."""
    await (await rt.session()).append(TOKENS[:1])
    return experts(rt).hits - experts(rt).guesses_used


async def test_a_warm_start_begins_with_what_was_used_and_says_the_same(model: Path) -> None:
    async with open_runtime(model, budget=budget()) as rt:
        said = await says(rt)
    assert not (model / USAGE_NAME).exists(), "only when asked"
    async with open_runtime(model, budget=budget(), warm_start=True) as rt:
        assert experts(rt).read_bytes == 0
        assert await known_at_once(rt) == 0
        assert await says(rt) == said
    before = names(model)
    async with open_runtime(model, budget=budget(), warm_start=True) as rt:
        assert experts(rt).read_bytes > 0, "before anything was asked for"
        assert await known_at_once(rt) > 0
        assert await says(rt) == said
    assert names(model) == before


async def test_a_run_that_asked_for_nothing_leaves_what_was_known(model: Path) -> None:
    async with open_runtime(model, budget=budget(), warm_start=True) as rt:
        await says(rt)
    kept = (model / USAGE_NAME).read_bytes()
    async with open_runtime(model, budget="1GiB", warm_start=True) as rt:
        await says(rt)  # all experts are in memory: nothing is counted
    assert (model / USAGE_NAME).read_bytes() == kept


@pytest.mark.parametrize("damage", ["cut", "other shape", "other layers", "negative", "no zip"])
def test_a_file_that_does_not_fit_is_left_alone(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    usage = np.arange(12, dtype=np.float64).reshape(2, 6)
    assert load_usage(tmp_path, (1, 2), 6) is None
    assert caplog.records == []
    assert save_usage(tmp_path, (1, 2), -usage if damage == "negative" else usage)
    if damage == "cut":
        (tmp_path / USAGE_NAME).write_bytes((tmp_path / USAGE_NAME).read_bytes()[:100])
    if damage == "no zip":
        (tmp_path / USAGE_NAME).write_bytes(b"usage")
    layers = (1, 3) if damage == "other layers" else (1, 2)
    assert load_usage(tmp_path, layers, 7 if damage == "other shape" else 6) is None
    assert "is left alone" in caplog.text


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    usage = np.random.default_rng(1).random((2, 6))
    assert save_usage(tmp_path, (1, 2), usage)
    found = load_usage(tmp_path, (1, 2), 6)
    assert found is not None
    assert np.array_equal(found, usage)
    assert not save_usage(tmp_path, (1, 2), np.zeros((2, 6)))
    assert [path.name for path in tmp_path.iterdir()] == [USAGE_NAME]


def test_a_folder_that_can_not_be_written_to_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not save_usage(tmp_path / "nowhere", (1,), np.ones((1, 2)))
    assert "can't be kept in" in caplog.text


@pytest.mark.parametrize("streamed", [True, False])
async def test_what_steps_wanted_is_recorded_and_simulated(model: Path, tmp_path: Path, streamed: bool) -> None:
    trace = tmp_path / "trace.npz"
    async with open_runtime(model, budget=budget() if streamed else "1GiB", trace=trace) as rt:
        said = await says(rt)
        assert (rt.status().experts is not None) is streamed
    async with open_runtime(model, budget="1GiB") as rt:
        assert await says(rt) == said
    recorded = RoutingTrace.load(trace)
    assert recorded.experts == TINY_K3.experts
    assert int(recorded.picks.sum()) % (len(recorded.layers) * TINY_K3.experts_per_token) == 0
    tokens = int(recorded.picks.sum()) // (len(recorded.layers) * TINY_K3.experts_per_token)
    assert tokens >= len(TOKENS) + GREEDY.max_tokens - 1
    result = runner.invoke(app, ["bench", "cache", "--trace", str(trace), "--json"])
    assert result.exit_code == 0, result.stderr
    assert {row["policy"] for row in json.loads(result.stdout)["table"]} == {"lru", "lfru", "next-use", "ideal"}


async def test_what_can_not_be_recorded_is_refused_before_loading(model: Path, tmp_path: Path) -> None:
    for trace in (tmp_path, tmp_path / "nowhere" / "t.npz"):
        with pytest.raises(BadParameter, match="name a file"):
            async with open_runtime(model, budget="1GiB", trace=trace):
                pytest.fail("it was opened")


def test_run_takes_both(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    arguments = ["run", str(model), "hello", "--max-tokens", "8", "--store", str(tmp_path / "s"), "--ignore-eos"]
    result = runner.invoke(app, [*arguments, "--budget", str(budget()), "--warm-start", "--trace", str(trace)])
    assert result.exit_code == 0, result.stderr
    assert RoutingTrace.load(trace).visits > 0
    assert (model / USAGE_NAME).exists()


def test_a_usage_file_is_no_part_of_the_weights(model: Path, tmp_path: Path) -> None:
    """A second model of other shape beside it: nothing but the warm start looks at the file."""
    write_tiny_model(tmp_path / "other", TINY_LINEAR)
    assert save_usage(tmp_path / "other", (1, 2), np.ones((2, 3)))
    packed = runner.invoke(app, ["pack", str(tmp_path / "other"), str(tmp_path / "packed"), "--json"])
    assert packed.exit_code == 0, packed.stderr
    assert not (tmp_path / "packed" / USAGE_NAME).exists()
