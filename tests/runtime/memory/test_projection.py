"""`plan --project`: the formula's terms for Kimi K3, by hand, and what the command prints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serai.checkpoints.snapshot import LatentType
from serai.runtime.bench.k3 import K3, k3_slices
from serai.runtime.bench.speeds import measure_speeds
from serai.runtime.cli.main import app
from serai.runtime.memory.plan import plan_memory
from serai.runtime.memory.projection import PROMPT_TOKENS, Speeds, project, quantities
from serai.runtime.models.config import load_config, parse_config
from serai.runtime.models.fewer_experts import with_experts_per_token
from serai.runtime.models.trunk import Trunk
from tests.runtime.models.small_checkpoints import DATA

CONFIG = load_config(DATA / "kimi-k3-config.json")
EXPERT = 17_547_264
SPEEDS = Speeds(
    disk_bytes=2e9,
    trunk_bytes=30e9,
    expert_bytes=25e9,
    product_operations=2e12,
    state_bytes=20e9,
    attention_operations=1e11,
)
TB = 10**12
runner = CliRunner()


def test_the_benchs_k3_is_the_published_one() -> None:
    assert plan_memory(parse_config(K3.config())) == plan_memory(CONFIG)


def test_a_slice_is_two_layers_at_full_width_with_ever_fewer_experts() -> None:
    slices = [parse_config(shape.config()) for shape in k3_slices()]
    assert [config.moe.experts for config in slices if config.moe] == [896, 448, 224, 112, 56]
    plans = [plan_memory(config) for config in slices]
    assert {(plan.kda_layers, plan.mla_layers, plan.moe_layers) for plan in plans} == {(1, 1, 1)}
    assert {(plan.expert_bytes, plan.experts_per_token) for plan in plans} == {(EXPERT, 16)}


def test_one_cold_token_of_k3_takes_what_memory_math_says() -> None:
    """1,472 experts, 25.8 GB, from a cache of one token's experts among 82,432."""
    plan = plan_memory(CONFIG, trunk=Trunk.Q8)
    one = project(CONFIG, plan, SPEEDS, 0, LatentType.BFLOAT16)[0]
    assert one.distinct == pytest.approx(1_472)
    assert one.slots == 1_472
    assert one.sharing == pytest.approx(1.0)
    assert one.hit == pytest.approx(1_472 / 82_432)
    assert one.read_bytes == pytest.approx(25.83e9 * (1 - one.hit), rel=1e-3)
    assert one.disk_s == one.read_bytes / 2e9
    numbers = quantities(CONFIG, plan)
    assert numbers.trunk_bytes == plan.trunk_bytes - 2 * 163_840 * 7_168
    assert numbers.expert_weights == 3 * 3072 * 3584
    assert numbers.attention_operations == 24 * 2 * 96 * (576 + 512)
    assert one.weights_s == pytest.approx(numbers.trunk_bytes / 30e9 + 1_472 * EXPERT / 25e9)
    assert one.states_s == pytest.approx(2 * 464_633_856 / 20e9)
    assert one.latents_s == pytest.approx(4_096 * numbers.attention_operations / 1e11)
    computing = max(one.weights_s, one.products_s) + one.states_s + one.latents_s
    assert one.step_s == max(one.disk_s, computing) == one.disk_s
    assert one.tokens_per_s == 1 / one.step_s


def test_rows_share_reads_and_memory_saves_them() -> None:
    plan = plan_memory(CONFIG)
    tight = project(CONFIG, plan, SPEEDS, 0, LatentType.BFLOAT16)
    assert [step.rows for step in tight] == [1, 8, 64, PROMPT_TOKENS]
    assert [step.sharing for step in tight] == sorted((step.sharing for step in tight), reverse=True)
    assert tight[3].distinct == pytest.approx(82_432)
    assert tight[1].distinct == pytest.approx(92 * 896 * (1 - (1 - 16 / 896) ** 8))
    roomy = project(CONFIG, plan, SPEEDS, 10 * TB, LatentType.BFLOAT16)
    assert {(step.hit, step.disk_s, step.slots) for step in roomy} == {(1.0, 0.0, 82_432)}
    fewer = with_experts_per_token(CONFIG, 8)
    half = project(fewer, plan_memory(fewer), SPEEDS, 0, LatentType.BFLOAT16)
    assert half[0].read_bytes == pytest.approx(tight[0].read_bytes / 2, rel=0.01)


def test_a_model_without_experts_reads_nothing() -> None:
    dense = parse_config(replace(K3, layers=4, attention_layers=(4,), experts=0).config())
    for step in project(dense, plan_memory(dense), SPEEDS, 0, LatentType.FLOAT32):
        assert (step.disk_s, step.slots, step.hit) == (0.0, 0, 1.0)


def test_the_machine_is_measured() -> None:
    speeds = measure_speeds(3e9, Trunk.Q8, fast=True, weight_bytes=8 << 20)
    assert speeds.disk_bytes == 3e9
    others = (speeds.trunk_bytes, speeds.expert_bytes, speeds.state_bytes)
    assert min(others) > 1e8
    assert min(speeds.product_operations, speeds.attention_operations) > 1e9


def test_the_command_shows_the_formula_and_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "serai.runtime.bench.speeds.measure_speeds", lambda disk, *_, **__: replace(SPEEDS, disk_bytes=disk)
    )
    arguments = ["plan", "nano", "--project", "--disk-rate", "3 GB"]
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)["projection"]
    assert made["speeds"]["disk_bytes"] == 3e9
    assert [one["model"] for one in made["models"]] == ["this model", "Kimi K3"]
    assert made["models"][1]["expert_bytes"] == EXPERT
    printed = runner.invoke(app, arguments).stdout
    for part in (
        "step = max(disk, max(weights, products) + states + latents)",
        "routing is even",
        "17,547,264",
        "tok/s",
    ):
        assert part in printed
    alone = runner.invoke(app, ["plan", str(DATA / "kimi-k3-config.json"), *arguments[2:], "--json"])
    assert [one["model"] for one in json.loads(alone.stdout)["projection"]["models"]] == ["Kimi K3"]
    refused = runner.invoke(app, ["plan", "nano", "--project", "--disk-rate", "fast"])
    assert "disk_rate is 'fast', but must be a size" in refused.stderr


def test_the_command_measures_the_disk_of_the_folder_given(tmp_path: Path) -> None:
    refused = runner.invoke(app, ["plan", "nano", "--project", "--dir", str(tmp_path / "nowhere")])
    assert refused.exit_code == 1
    assert "name a folder that exists" in refused.stderr


def test_attention_families_are_compared_at_each_context() -> None:
    """The figures of memory-math."""
    printed = runner.invoke(
        app, ["plan", str(DATA / "kimi-k3-config.json"), "--compare"], env={"COLUMNS": "160"}
    ).stdout
    lines = {line[:30]: line for line in printed.splitlines()}
    assert "4,096 tokens" in printed
    assert "1,048,576 tokens" in printed
    for name, *figures in (
        ("this model (24 MLA + 69 KDA la", "27.6 kB", "217 MB", "3.84 GB", "29.2 GB"),
        ("all 93 layers latent attention", "107 kB"),
        ("Llama-2-7B (multi-head, fp16) ", "524 kB", "2.15 GB"),
        ("Qwen3-30B-A3B (grouped-query, ", "98.3 kB"),
        ("the same with 32 key heads (mu", "786 kB"),
        ("DeepSeek-V3, Kimi K2 (latent, ", "70.3 kB"),
    ):
        for figure in figures:
            assert f" {figure}" in lines[name], (name, figure)
