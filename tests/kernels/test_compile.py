"""Lazy compilation, its cache, and what a kernel refuses."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from serai.kernels import cache, cpu
from serai.kernels.compile import Progress, compilations, kernels, warm
from serai.kernels.quantize import Quantized, quantize_rows

ROOT = Path(__file__).resolve().parents[2]

SHOW_WARM = """
from serai.kernels import compile, threads, cpu, cache
seen = []
report = compile.warm(seen.append)
assert [p.done for p in seen] == list(range(1, len(seen) + 1)) and seen[-1].total == len(seen)
print(report.compiled, report.from_cache, compile.compilations(), report.folder)
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr.strip()


def test_importing_kernels_compiles_nothing(tmp_path: Path) -> None:
    code = "from serai.kernels import matmul, moe, compile as c; print([k for k in c.kernels() if k.is_ready])"
    assert run(code, SERAI_CACHE=str(tmp_path)) == "[]"


def test_a_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    compiled, loaded, count, folder = run(SHOW_WARM, SERAI_CACHE=str(tmp_path)).split()
    assert int(compiled) == int(count) > 0
    assert int(loaded) == 0
    assert Path(folder).is_relative_to(tmp_path)
    again, from_cache, count_again, _ = run(SHOW_WARM, SERAI_CACHE=str(tmp_path)).split()
    assert (int(again), int(count_again)) == (0, 0)
    assert int(from_cache) == int(compiled)


def test_a_damaged_cache_is_compiled_again(tmp_path: Path) -> None:
    run(SHOW_WARM, SERAI_CACHE=str(tmp_path))
    for file in tmp_path.rglob("*.nb*"):
        file.write_bytes(b"not a cache")
    assert "unreadable" in run(SHOW_WARM, SERAI_CACHE=str(tmp_path))


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_one(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    told = run(SHOW_WARM, SERAI_CACHE=str(blocked))
    assert "cannot be kept" in told
    assert "serai-kernels-" in told


def test_the_cache_of_another_cpu_or_path_is_never_met(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cache.cache_key()
    monkeypatch.setattr(cpu, "cpu_name", lambda: "another-cpu")
    assert cache.cache_key.__wrapped__() != here
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "compiled_features", lambda: "+other")
    assert cache.cache_key.__wrapped__() != here


def test_the_build_id_ignores_the_cpu_type_but_not_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cache.build_id()
    monkeypatch.setattr(cpu, "cpu_name", lambda: "another-cpu")
    assert cache.build_id() == here
    assert here.endswith(cpu.chosen_path().value)


def test_nothing_is_compiled_after_warming_up() -> None:
    progress: list[Progress] = []
    warm(progress.append)
    assert len(progress) == len(kernels())
    before = compilations()
    quantize_rows(np.ones((2, 64), np.float32), 0, Quantized.empty(2, 64))
    assert compilations() == before


def test_a_kernel_refuses_other_dtypes_and_layouts() -> None:
    """B07: a slice or another dtype must not be copied silently."""
    out = Quantized.empty(2, 32)
    with pytest.raises(TypeError, match="float64"):
        quantize_rows(np.ones((2, 32)), 0, out)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        quantize_rows(np.ones((2, 64), np.float32)[:, ::2], 0, out)
