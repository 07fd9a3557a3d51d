"""`serai bench model --against llama`: the same weights in both forms, and no comparison of different functions."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels.matrix import pack_mxfp4, unpack
from serai.runtime.bench import against, gguf_model, llama, model
from serai.runtime.bench.against import (
    SMALL,
    Bounds,
    Serai,
    Speeds,
    bench_against_llama,
    check_same_function,
    compare,
    difference,
    one_round,
    prompts,
    report,
)
from serai.runtime.bench.gguf_model import mxfp4_blocks, write_gguf
from serai.runtime.bench.kernels import Peaks
from serai.runtime.bench.llama import Llama, why_not
from serai.runtime.bench.mid import MidModel
from serai.runtime.bench.report import BenchFailed
from serai.runtime.bench.step_bound import StepCost, step_cost
from serai.runtime.bench.tiny import TINY_LINEAR, write_tiny_model
from serai.runtime.errors import BadParameter
from serai.runtime.models.open_model import Precision, find_model, load_model
from serai.runtime.models.trunk import Trunk
from serai.runtime.state import Part, part_bytes

Tokens = NDArray[np.int32]


def test_mxfp4_weights_keep_every_value_in_llama_cpps_blocks() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (48, 32), dtype=np.uint8)
    scales = rng.integers(110, 140, (48, 2), dtype=np.uint8)
    theirs = gguf.quants.dequantize(mxfp4_blocks(packed, scales), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(theirs, unpack(pack_mxfp4(packed, scales))[0])


def test_a_gguf_holds_the_checkpoints_weights(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", SMALL)
    found = find_model(tmp_path / "m")
    assert write_gguf(found.config, found.files, tmp_path / "m.gguf") == (tmp_path / "m.gguf").stat().st_size
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}

    def stored(name: str) -> NDArray[np.float32]:
        return found.files.read_float32(found.prefix + name)

    head, kept = tensors["output.weight"], stored("lm_head.weight")
    values = gguf.quants.dequantize(head.data, head.tensor_type)
    assert np.linalg.norm(values - kept) / np.linalg.norm(kept) < 0.01
    router = tensors["blk.1.ffn_gate_inp.weight"]
    np.testing.assert_array_equal(router.data, stored("model.layers.1.block_sparse_moe.gate.weight"))
    assert tensors["blk.1.ffn_gate_exps.weight"].tensor_type == gguf.GGMLQuantizationType.MXFP4
    decay = tensors["blk.0.ssm_a"].data
    np.testing.assert_allclose(decay, -np.exp(stored("model.layers.0.self_attn.A_log").reshape(-1)[:4]), rtol=1e-6)
    found.files.close()


def test_only_k3_with_packed_experts_is_written(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", TINY_LINEAR)
    found = find_model(tmp_path / "m")
    with pytest.raises(BenchFailed, match="only a Kimi K3 with MXFP4 experts"):
        write_gguf(found.config, found.files, tmp_path / "m.gguf")
    found.files.close()


def test_serai_and_llama_cpp_compute_the_same_function(tmp_path: Path) -> None:
    """Over a prompt, over single tokens, and for a sequence that was forgotten and begun again."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    write_tiny_model(tmp_path / "m", SMALL)
    found = find_model(tmp_path / "m")
    write_gguf(found.config, found.files, tmp_path / "m.gguf", in_float32=True)
    loaded = load_model(found, Precision.EXACT, max_rows=512)
    serai = Serai(loaded)
    llama = Llama(tmp_path / "m.gguf", threads=2, sequences=9, tokens=200, batch=512, in_float32=True)
    try:
        error, agreed = compare(serai, llama, SMALL.vocab)
        assert error < 2e-4
        assert agreed >= 7
        errors = []
        for token in (5, 7, 11):
            parts = [(sequence, np.array([token + sequence], np.int32)) for sequence in range(1, 9)]
            errors.append(difference(serai.feed(parts), llama.feed(parts)))
        assert np.median(errors) < 2e-4
        for side in (serai, llama):
            for sequence in range(1, 9):
                side.forget(sequence)
        again, _ = compare(serai, llama, SMALL.vocab)
        assert again == pytest.approx(error, rel=0.5)
    finally:
        llama.close()
        loaded.model.close()


def test_what_is_measured_in_8_bits_is_the_same_function(tmp_path: Path) -> None:
    """The file that speeds are taken with: few layers, all experts picked, so that roundings do not scatter."""
    if (why := why_not()) is not None:
        pytest.skip(why)
    few = replace(SMALL, layers=4, attention_layers=(4,), experts=8, experts_per_token=8)
    write_tiny_model(tmp_path / "m", few)
    found = find_model(tmp_path / "m")
    write_gguf(found.config, found.files, tmp_path / "m.gguf")
    loaded = load_model(found, Precision.FAST, max_rows=512, trunk=Trunk.Q8)
    llama = Llama(tmp_path / "m.gguf", threads=2, sequences=9, tokens=200, batch=512)
    try:
        parts = prompts(few.vocab)
        assert difference(Serai(loaded).feed(parts), llama.feed(parts)) < 0.15
    finally:
        llama.close()
        loaded.model.close()


def test_the_claim_says_how_near_the_two_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "in_float32_and_in_8_bits", lambda: (2e-5, 7, 1.1))
    assert check_same_function() == (
        "in float32 the logits of a small model (16 layers, 4 of 32 experts picked by the router) differ by 2e-05 of "
        "their size, 7 of 8 top-1 equal; 8 bits move serai's own by 1.10, its weights being random"
    )


class Scripted:
    """A side that answers with noise around what the tokens say, and counts what it is asked."""

    def __init__(self, noise: float) -> None:
        self.noise = noise
        self.fed: list[list[tuple[int, int]]] = []
        self.forgot: list[int] = []

    def feed(self, parts: Sequence[tuple[int, Tokens]]) -> NDArray[np.float32]:
        self.fed.append([(sequence, len(tokens)) for sequence, tokens in parts])
        said = np.stack([np.random.default_rng(int(tokens.sum())).standard_normal(50) for _, tokens in parts])
        return (said + self.noise * np.random.default_rng(1).standard_normal(said.shape)).astype(np.float32)

    def forget(self, sequence: int) -> None:
        self.forgot.append(sequence)


def test_sides_that_differ_are_not_compared() -> None:
    error, agreed = compare(Scripted(0.0), Scripted(1e-4), 300)
    assert 5e-5 < error < 2e-4
    assert agreed == 8
    with pytest.raises(BenchFailed, match=r"differ by 0\.\d+ of their size, so nothing is compared"):
        compare(Scripted(0.0), Scripted(0.01), 300)
    with pytest.raises(BenchFailed, match="nothing is compared"):
        compare(Scripted(0.0), Scripted(np.nan), 300)


def test_both_sides_do_the_same_work_in_a_round() -> None:
    ours, theirs = Scripted(0), Scripted(0)
    speeds = one_round(ours, theirs, 300, 0)
    assert ours.fed == theirs.fed
    assert ours.forgot == theirs.forgot == [0]
    assert ours.fed[0] == [(0, 512)]
    assert ours.fed[-1] == [(sequence, 1) for sequence in range(1, 9)]
    assert all(value > 0 for side in speeds for value in (side.prefill, side.decode, side.sessions8))


def open_files(ending: str) -> set[Path]:
    """The files with that ending that this process has open."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("open files are listed in /proc/self/fd, which this system lacks")
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {link.readlink() for link in links if link.readlink().suffix == ending}


def test_nothing_stays_open_when_llama_cpp_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> Llama:
        assert open_files(".safetensors") > before
        raise BenchFailed("llama.cpp does not open it")

    monkeypatch.setattr(against, "Llama", refuses)
    before = open_files(".safetensors")
    with pytest.raises(BenchFailed, match="does not open"):
        check_same_function()
    assert open_files(".safetensors") == before
    monkeypatch.setattr(against, "check_same_function", lambda: "alike")
    write_tiny_model(tmp_path / "m", SMALL)
    with pytest.raises(BenchFailed, match="does not open"):
        bench_against_llama(MidModel(tmp_path / "m", SMALL, 1), tmp_path / "m.gguf", quick=True, tell=lambda _: None)
    assert open_files(".safetensors") == before


def test_llama_cpps_model_is_freed_when_it_makes_no_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    fake = SimpleNamespace(
        llama_model_default_params=SimpleNamespace,
        llama_context_default_params=SimpleNamespace,
        llama_model_load_from_file=lambda path, params: "the model",
        llama_init_from_model=lambda opened, params: None,
        llama_model_free=freed.append,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    monkeypatch.setattr(llama, "_begin", lambda: None)
    with pytest.raises(BenchFailed, match="makes no context for 9 sequences of 200 tokens"):
        Llama(tmp_path / "m.gguf", threads=1, sequences=9, tokens=200, batch=64)
    assert freed == ["the model"]


@pytest.mark.parametrize("crashes", [True, False])
def test_a_claim_is_the_median_over_rounds_and_may_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crashes: bool
) -> None:
    """And says which of llama.cpp's layouts it was without, and how it was built."""
    monkeypatch.setattr(against, "crashes_with_amx", lambda: crashes)
    monkeypatch.setattr(against, "system_info", lambda: "CPU : AVX2 = 1")
    (tmp_path / "m.gguf").write_bytes(b"x")
    made = MidModel(tmp_path, SMALL, 1)
    rounds = [(Speeds(40, 14, 31), Speeds(10, 10, 10)), (Speeds(30, 20, 90), Speeds(10, 10, 10))] * 2
    # A decoded token takes a twentieth of a second at least, and 512 tokens 8: at most 20 and 64 tokens a second.
    costs = {"decode": StepCost(1e9, 0, 0), "prefill": StepCost(1, 4e9, 2e9), "sessions8": StepCost(1e9, 1, 1)}
    bounds = Bounds(costs, Peaks(read=2e10, copy=1, int8=1e9, bfloat16=1, float32=5e8))
    result = report([*rounds, rounds[0]], made, tmp_path / "m.gguf", "alike", bounds)
    claims = {claim.name: claim for claim in result.claims}
    assert {name: (claim.value, claim.holds) for name, claim in claims.items()} == {
        "decode_vs_llama": (1.4, True),
        "prefill_vs_llama": (4.0, True),
        "sessions8_vs_llama": (3.1, True),
    }
    for claim in claims.values():
        assert ("llama.cpp with AMX and repacked layouts both off (release 0.3.36 crashes" in claim.detail) is crashes
        assert claim.detail.endswith("alike; llama.cpp's build: CPU : AVX2 = 1")
    moved = "1.00 GB at a stream read's 20.0 GB/s: serai reaches 0.70 of it, llama.cpp 0.50, so the ratio could be 2.00"
    assert f"the bound of a step is {moved} at most" in claims["decode_vs_llama"].detail
    multiplied = "0.00 TOP in 8 bits and 0.00 in float32 at 1 and 0 GOP/s in registers"
    assert f"{multiplied}: serai reaches 0.62 of it, llama.cpp 0.16" in claims["prefill_vs_llama"].detail
    slow = report([(Speeds(1, 1, 1), Speeds(1, 1, 1))], made, tmp_path / "m.gguf", "alike", bounds)
    assert [claim.holds for claim in slow.claims] == [False] * 3


def test_without_llama_cpp_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "why_not", lambda: "llama_cpp is not installed")
    claims = model.bench_against(tmp_path, "llama", quick=True, tell=lambda _: None).claims
    assert [(claim.holds, claim.detail) for claim in claims] == [(None, "llama_cpp is not installed")] * 3
    with pytest.raises(BadParameter, match="--against is 'llama', not 'vllm'"):
        model.bench_against(tmp_path, "vllm", quick=True, tell=lambda _: None)


def test_contexts_are_refused_beside_a_peer(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="--context is for the grid, and --against has its own prompts"):
        model.bench_against(tmp_path, "llama", quick=True, tell=lambda _: None, only_contexts=[0])


def test_a_steps_cost_counts_what_it_reads_and_multiplies(tmp_path: Path) -> None:
    """By hand, of a model of one dense and one MoE layer: what the configuration says, not what the weights hold."""
    shape = replace(SMALL, layers=2, attention_layers=(2,))
    write_tiny_model(tmp_path / "m", shape)
    loaded = load_model(find_model(tmp_path / "m"), Precision.FAST, max_rows=8, trunk=Trunk.Q8)
    one, eight = step_cost(loaded, 1, 1), step_cost(loaded, 8, 8)
    experts = loaded.model.experts
    assert experts is not None
    head = loaded.model.weights.head
    trunk = loaded.model.weights.bytes - loaded.model.weights.embedding.nbytes
    state = 2 * part_bytes(loaded.layout, Part.FIXED)
    picked = shape.experts_per_token * experts.layout.record_bytes
    vectors = trunk + state + picked - one.nbytes
    assert 0 < vectors < 0.1 * trunk, "all but norms, biases and filters of the trunk"
    visited = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** 8)
    assert eight.nbytes - one.nbytes == pytest.approx(7 * state + (visited / shape.experts_per_token - 1) * picked)
    assert eight.int8_operations == pytest.approx(8 * one.int8_operations)
    assert one.int8_operations > 2 * head.rows * head.cols
    assert eight.float32_operations == pytest.approx(8 * one.float32_operations)
    assert one.float32_operations > 2 * shape.experts * shape.hidden, "the router is one of them"


def test_the_models_second_form_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "why_not", lambda: None)
    monkeypatch.setattr(model, "largest_that_fits", lambda room_bytes: SMALL)
    monkeypatch.setattr(model, "with_layers", lambda shape, layers, vocab: shape)
    seen: list[Path] = []
    monkeypatch.setattr(model, "bench_against_llama", lambda made, gguf, **_: seen.append(gguf))
    told: list[str] = []
    for _ in range(2):
        model.bench_against(tmp_path, "llama", quick=True, tell=told.append)
    assert seen[0] == seen[1]
    assert seen[0].exists()
    assert seen[0].parent == tmp_path
    assert told.count("the same as GGUF") == 1
    monkeypatch.setattr(gguf_model, "RECIPE", gguf_model.RECIPE + 1)
    model.bench_against(tmp_path, "llama", quick=True, tell=told.append)
    assert seen[2] != seen[0], "another recipe's file is not taken for this one's"
    assert told.count("the same as GGUF") == 2
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_gguf_that_can_not_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(values: NDArray[np.float32]) -> NDArray[np.uint16]:
        assert open_files(".gguf")
        raise OSError("no space left on device")

    write_tiny_model(tmp_path / "m", SMALL)
    found = find_model(tmp_path / "m")
    monkeypatch.setattr(gguf_model, "_bf16", breaks)
    with pytest.raises(OSError, match="no space"):
        write_gguf(found.config, found.files, tmp_path / "m.gguf")
    assert not open_files(".gguf")
    full = SimpleNamespace(free=1_000)
    monkeypatch.setattr("serai.runtime.bench.gguf_model.shutil.disk_usage", lambda folder: full)
    with pytest.raises(BenchFailed, match="where 1,000 are free; name another --dir"):
        write_gguf(found.config, found.files, tmp_path / "m.gguf")
    found.files.close()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
