"""The plan reproduces every figure of memory-math, exactly, and its floors hold together."""

import json
from pathlib import Path

import pytest

from serai.checkpoints.snapshot import LatentType
from serai.runtime.errors import BadParameter, BudgetTooSmall, WeightsInvalid
from serai.runtime.memory.beside import PROCESS_BYTES, beside_bytes
from serai.runtime.memory.plan import READING_RECORDS, MemoryPlan, check_budget, plan_memory, sessions_that_fit
from serai.runtime.memory.weights import expert_record_bytes, held_bytes
from serai.runtime.models.config import ModelConfig, load_config, parse_config
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.scratch_shape import ScratchShape
from serai.runtime.models.tensor_table import expert_tensors, trunk_tensors
from serai.runtime.models.trunk import Trunk
from tests.runtime.models.small_checkpoints import (
    DATA,
    changed,
    k3_raw,
    linear_raw,
    random_tensors,
    write_checkpoint,
    write_tensors,
)

K3 = load_config(DATA / "kimi-k3-config.json")
LINEAR = load_config(DATA / "kimi-linear-48b-config.json")
MIB, GIB = 2**20, 2**30


def test_k3s_state_is_as_published() -> None:
    plan = plan_memory(K3, context_tokens=4096)
    assert plan.kda_bytes == 434_110_464 == 414 * MIB
    assert plan.conv_bytes == 30_523_392
    assert plan.kda_bytes + plan.conv_bytes == 464_633_856, "the fixed 465 MB of a session"
    assert (plan.latent_token_bytes.float32, plan.latent_token_bytes.bfloat16) == (55_296, 27_648)
    assert plan.latent_bytes.float32 == 226_492_416 == 216 * MIB
    assert plan.latent_bytes.bfloat16 == 113_246_208
    assert plan.session_bytes.float32 == 434_110_464 + 30_523_392 + 226_492_416
    assert round(plan.session_bytes.float32 / MIB) == 659
    assert plan.hot_session_bytes.float32 == plan.session_bytes.float32 + 4 * 163_840 + beside_bytes(4_096)


def test_k3s_fixed_state_does_not_grow_with_the_context() -> None:
    short, long = plan_memory(K3, context_tokens=1), plan_memory(K3, context_tokens=1_048_576)
    assert (short.kda_bytes, short.conv_bytes) == (long.kda_bytes, long.conv_bytes)
    assert long.latent_bytes.float32 == 54 * GIB


def test_k3s_experts_are_as_published() -> None:
    plan = plan_memory(K3)
    assert plan.expert_bytes == plan.expert_slot_bytes == 17_547_264
    assert (plan.moe_layers, plan.experts_per_layer, plan.experts_per_token) == (92, 896, 16)
    assert plan.token_experts == 1_472
    assert plan.token_expert_bytes == 1_472 * 17_547_264
    assert round(plan.token_expert_bytes / 1e9, 1) == 25.8
    assert plan.experts_total_bytes == 92 * 896 * 17_547_264
    assert round(plan.experts_total_bytes / 1e12, 3) == 1.446
    assert (plan.min_expert_slots, plan.min_expert_bytes) == (16, 16 * 17_547_264)
    assert plan.min_expert_slots_rule == "the 16 experts one token uses in one layer"


def test_k3s_files_are_as_published() -> None:
    """1453.66 GiB with the vision part; the text part is what we count."""
    plan = plan_memory(K3)
    hidden, width = 4096, 7168
    vision = 27 * (2 * 1024 + 4608 * 1024 + 1024 * 1536 + 2 * 4096 * 1024) + 1024 * 3 * 14 * 14 + 64 * 64 * 1024 + 1024
    vision += hidden * hidden + width * hidden + width
    total = plan.trunk_stored_bytes + plan.experts_total_bytes + 2 * vision
    assert round(total / GIB, 2) == 1453.66
    assert 0.92 < plan.experts_total_bytes / (plan.trunk_stored_bytes + plan.experts_total_bytes) < 0.93


def test_kimi_linear_is_as_published() -> None:
    plan = plan_memory(LINEAR)
    assert plan.kda_bytes == 41_943_040 == 40 * MIB
    assert plan.kda_bytes + plan.conv_bytes == 44_892_160
    assert (plan.latent_token_bytes.float32, plan.latent_token_bytes.bfloat16) == (16_128, 8_064)
    assert round((plan.trunk_stored_bytes + plan.experts_total_bytes) / GIB, 1) == 91.5
    assert plan.expert_bytes == 3 * 1024 * 2304 * 2


@pytest.mark.parametrize("config", [K3, LINEAR], ids=["k3", "linear"])
def test_the_floors_are_sums_of_their_parts(config: ModelConfig) -> None:
    plan = plan_memory(config, context_tokens=1000, step_rows=32)
    for latents in LatentType:
        base = plan.trunk_bytes + plan.scratch_bytes + PROCESS_BYTES + plan.running_session_bytes.of(latents)
        slot = plan.expert_slot_bytes
        assert plan.floor_bytes.of(latents) == base + plan.moe_layers * plan.experts_per_layer * slot
        assert plan.streaming_floor_bytes.of(latents) == base + (plan.min_expert_slots + READING_RECORDS) * slot
        assert plan.working_set_bytes.of(latents) == base + (plan.token_experts + READING_RECORDS) * slot
        fixed = plan.kda_bytes + plan.conv_bytes + plan.logits_bytes
        page = plan.latent_page_bytes.of(latents)
        hot = fixed + 16 * page + beside_bytes(1_000)
        assert plan.hot_session_bytes.of(latents) == hot, "1,000 tokens take 16 pages of 64"
        assert plan.running_session_bytes.of(latents) == plan.hot_session_bytes.of(latents) + 2 * fixed + page


def test_the_plan_is_plain_json_with_whole_numbers() -> None:
    plain = plan_memory(K3).to_json()
    assert json.loads(json.dumps(plain)) == plain
    for key, value in plain.items():
        if key.endswith("_bytes"):
            figures = value.values() if isinstance(value, dict) else [value]
            assert all(type(figure) is int for figure in figures)
    assert plain["latent_token_bytes"] == {"float32": 55_296, "bfloat16": 27_648, "q8": 14_016}


def small_plan(tokens: int = 640) -> MemoryPlan:
    return plan_memory(parse_config(linear_raw()), context_tokens=tokens, step_rows=8)


def test_a_budget_at_the_floor_passes_and_a_byte_less_is_refused_with_the_numbers() -> None:
    plan = small_plan()
    for latents in LatentType:
        for streaming in (False, True):
            floor = (plan.streaming_floor_bytes if streaming else plan.floor_bytes).of(latents)
            check_budget(plan, floor, latents, streaming=streaming)
            with pytest.raises(BudgetTooSmall) as caught:
                check_budget(plan, floor - 1, latents, streaming=streaming)
            assert (caught.value.budget_bytes, caught.value.floor_bytes) == (floor - 1, floor)
            for number in (floor - 1, floor, plan.trunk_bytes, plan.scratch_bytes, 640):
                assert f"{number:,}" in str(caught.value)


def test_the_refusal_names_what_would_fit_and_it_does() -> None:
    plan = small_plan(10_240)
    page = plan.latent_page_bytes.float32
    budget = plan.floor_bytes.float32 - 3 * page
    with pytest.raises(BudgetTooSmall, match=r'a context of 7,168 tokens or latents="bfloat16" would fit'):
        check_budget(plan, budget, LatentType.FLOAT32)
    check_budget(small_plan(7_168), budget, LatentType.FLOAT32)
    with pytest.raises(BudgetTooSmall):
        check_budget(small_plan(7_169), budget, LatentType.FLOAT32)
    check_budget(plan, budget, LatentType.BFLOAT16)
    least = plan.floor_bytes.q8
    for latents in (LatentType.FLOAT32, LatentType.BFLOAT16):
        with pytest.raises(BudgetTooSmall, match=r'tokens or latents="q8" would fit'):
            check_budget(plan, least, latents)
    check_budget(plan, least, LatentType.Q8)
    with pytest.raises(BudgetTooSmall, match=rf"; a budget of {plan.floor_bytes.float32:,} bytes would fit$"):
        check_budget(plan, 1, LatentType.FLOAT32)


def test_the_refusal_names_all_that_would_fit_together_and_each_does() -> None:
    plan = small_plan(10_240)
    budget = plan.floor_bytes.float32 - 1
    options = r'a context of 9,216 tokens or latents="bfloat16" or trunk="q8" would fit$'
    with pytest.raises(BudgetTooSmall, match=options):
        check_budget(plan, budget, LatentType.FLOAT32)
    check_budget(small_plan(9_216), budget, LatentType.FLOAT32)
    check_budget(plan, budget, LatentType.BFLOAT16)
    quantised = plan_memory(parse_config(linear_raw()), context_tokens=10_240, step_rows=8, trunk=Trunk.Q8)
    check_budget(quantised, budget, LatentType.FLOAT32)


@pytest.mark.parametrize(("trunk", "smaller"), [(Trunk.Q8, "q4"), (Trunk.Q4, None)])
def test_the_refusal_names_the_largest_trunk_that_would_fit_and_it_does(trunk: Trunk, smaller: str | None) -> None:
    config = parse_config(linear_raw())
    plan = small_plan()
    budget = plan.floor_bytes.bfloat16 - plan.trunk_saves_bytes[trunk.value]
    with pytest.raises(BudgetTooSmall, match=rf'or trunk="{trunk.value}" would fit'):
        check_budget(plan, budget, LatentType.BFLOAT16)
    quantised = plan_memory(config, context_tokens=640, step_rows=8, trunk=trunk)
    check_budget(quantised, budget, LatentType.BFLOAT16)
    assert (plan.trunk, quantised.trunk, quantised.trunk_saves_bytes[trunk.value]) == ("as stored", trunk.value, 0)
    for made in (plan, quantised):
        with pytest.raises(BudgetTooSmall) as caught:
            check_budget(made, budget - 1, LatentType.BFLOAT16)
        told = str(caught.value)
        assert "trunk=" not in told if smaller is None else f'trunk="{smaller}" would fit' in told


def test_sessions_that_fit_are_counted_to_the_byte() -> None:
    plan = small_plan()
    floor, more = plan.floor_bytes.float32, plan.hot_session_bytes.float32
    expected = [(floor - 1, 0), (floor, 1), (floor + more - 1, 1), (floor + more, 2), (floor + 9 * more, 10)]
    for budget, sessions in expected:
        assert sessions_that_fit(plan, budget, LatentType.FLOAT32) == sessions
    assert plan.streaming_floor_bytes == plan.floor_bytes, "so few experts are held rather than read"
    large = plan_memory(K3)
    floor = large.streaming_floor_bytes.bfloat16
    assert sessions_that_fit(large, floor, LatentType.BFLOAT16, streaming=True) == 1
    assert sessions_that_fit(large, floor, LatentType.BFLOAT16) == 0


@pytest.mark.parametrize("raw", [linear_raw(), k3_raw()], ids=["linear", "k3"])
def test_headers_and_configuration_agree_on_a_checkpoint_in_the_published_types(
    tmp_path: Path, raw: dict[str, object]
) -> None:
    config = write_checkpoint(tmp_path, raw, shards=2)
    with CheckpointFiles.open(tmp_path) as files:
        plan = plan_memory(config, files)
        stored = sum(info.nbytes for info in files.tensors.values())
    assert plan.source == "headers"
    assert plan.trunk_stored_bytes + plan.experts_total_bytes == stored
    assert plan_memory(config).to_json() == {**plan.to_json(), "source": "config"}


def test_headers_decide_when_the_files_are_wider_than_the_configuration_says(tmp_path: Path) -> None:
    wide = parse_config(changed(linear_raw(), "dtype", "float32"))
    write_tensors(tmp_path / "model.safetensors", random_tensors(wide))
    narrow = parse_config(linear_raw())
    with CheckpointFiles.open(tmp_path) as files:
        plan = plan_memory(narrow, files)
    assert plan.expert_bytes == 2 * plan_memory(narrow).expert_bytes
    assert plan.trunk_bytes == plan_memory(wide).trunk_bytes > plan_memory(narrow).trunk_bytes


def test_headers_that_lack_a_tensor_are_refused_by_its_name(tmp_path: Path) -> None:
    config = parse_config(linear_raw())
    tensors = random_tensors(config)
    del tensors["model.norm.weight"]
    write_tensors(tmp_path / "model.safetensors", tensors)
    with CheckpointFiles.open(tmp_path) as files, pytest.raises(WeightsInvalid, match=r"no tensor 'model\.norm\.weig"):
        plan_memory(config, files)


def test_a_tied_embedding_counts_once() -> None:
    """B26."""
    tied = plan_memory(parse_config(changed(linear_raw(), "tie_word_embeddings", True)))
    assert plan_memory(parse_config(linear_raw())).trunk_bytes - tied.trunk_bytes == 128 * 64 * 2


def test_a_model_without_experts_needs_no_slots() -> None:
    plan = plan_memory(parse_config(changed(linear_raw(), "num_experts", None)))
    assert (plan.expert_bytes, plan.experts_total_bytes, plan.min_expert_slots, plan.token_experts) == (0, 0, 0, 0)
    assert plan.min_expert_slots_rule == "the model has no routed experts"
    assert plan.floor_bytes == plan.streaming_floor_bytes == plan.working_set_bytes


def test_a_model_without_latent_layers_costs_nothing_a_token() -> None:
    raw = linear_raw()
    raw["linear_attn_config"].update(kda_layers=[1, 2], full_attn_layers=[])
    plan = plan_memory(parse_config(raw))
    assert plan.latent_bytes.float32 == 0
    with pytest.raises(BudgetTooSmall, match=r"bytes would fit$"):
        check_budget(plan, 1, LatentType.FLOAT32)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(BadParameter, match=r"^context_tokens is 0, but must be at least 1"):
        plan_memory(K3, context_tokens=0)
    with pytest.raises(BadParameter, match=r"^step_rows is -1, but must be at least 1"):
        plan_memory(K3, step_rows=-1)


def test_scratch_grows_with_the_rows_and_holds_every_experts_output() -> None:
    shape = ScratchShape.of(K3)
    # Ids, addresses of two words and starts of the experts, one start more, their number; 512 rows reach every expert.
    lists = (2 + 4 * 16, 2 + 4 * 896)
    assert shape.bytes_for(512) - 4 * lists[1] == 512 * (shape.bytes_for(1) - 4 * lists[0])
    assert plan_memory(K3, kernel_scratch_bytes=99).scratch_bytes == plan_memory(K3).scratch_bytes + 99
    assert (shape.picks, shape.expert_inner, shape.expert_out) == (16, 3072, 3584)
    assert shape.blocks == 9, "8 blocks and the running sum"
    assert shape.projected == 2 * 33_792, "the dense layer is the widest"
    assert ScratchShape.of(LINEAR).blocks == 1


def test_loaded_tensors_are_counted_as_they_are_held() -> None:
    config = parse_config(k3_raw())
    specs = trunk_tensors(config)
    stem = "model.layers."
    held = {name: held_bytes(config, spec, spec.usual_dtype) for name, spec in specs.items()}
    assert held["model.embed_tokens.weight"] == 128 * 64 * 2
    assert held[stem + "0.self_attn.b_proj.weight"] == 16 * 64 * 2, "two rows, filled up to a block of 16"
    assert held["model.norm.weight"] == 64 * 4
    assert held[stem + "0.self_attn.q_conv1d.weight"] == 32 * 4 * 4
    assert held[stem + "0.mlp_res_norm.weight"] == 0
    assert held[stem + "0.mlp_res_proj.weight"] == 64 * 4
    assert held[stem + "1.self_attn.kv_b_proj.weight"] == 2 * (32 * 16 + 16 * 32) * 2
    parts = expert_tensors(config)
    dtypes = {part: spec.usual_dtype for part, spec in parts.items()}
    assert sum(spec.shape[0] * spec.shape[1] for spec in parts.values()) == 3 * 32 * 17
    assert expert_record_bytes(parts, dtypes) == 4096
