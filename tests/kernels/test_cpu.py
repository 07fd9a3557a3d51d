"""The choice of SIMD path: the best by default, any by name, a clear refusal otherwise."""

import pytest

from serai.kernels import cpu
from serai.kernels.cpu import SimdPath, SimdPathUnavailable


def test_the_best_path_comes_first_and_plain_is_always_there() -> None:
    paths = cpu.available_paths()
    assert cpu.resolve("", paths) is paths[0]
    assert paths[-1] is SimdPath.PLAIN


def test_a_path_can_be_forced_by_name() -> None:
    for path in SimdPath:
        assert cpu.resolve(path.value, list(SimdPath)) is path


def test_a_name_that_means_nothing_is_refused_with_the_names_that_do() -> None:
    with pytest.raises(SimdPathUnavailable, match=r"'avx3' names no SIMD path.*avx2, plain"):
        cpu.resolve("avx3", [SimdPath.AVX2, SimdPath.PLAIN])


def test_a_path_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(SimdPathUnavailable, match="which this CPU lacks; it has plain"):
        cpu.resolve("avx512-vnni", [SimdPath.PLAIN])


def test_a_smaller_path_hides_the_features_of_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "features", lambda: {"avx2": True, "avx512f": True, "avxvnni": True, "sse2": True})
    monkeypatch.setattr(cpu, "chosen_path", lambda: SimdPath.AVX2)
    assert cpu.compiled_features() == "+avx2,-avx512f,-avxvnni,+sse2"
    monkeypatch.setattr(cpu, "chosen_path", lambda: SimdPath.AVX512_VNNI)
    assert cpu.compiled_features() == "+avx2,+avx512f,+avxvnni,+sse2"
