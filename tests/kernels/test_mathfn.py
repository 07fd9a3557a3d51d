"""The vector functions are within a couple of units in the last place everywhere, and right at the ends."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels import mathfn, naive
from serai.kernels.compile import inline, kernel
from serai.kernels.memory import load16_n, store16_n
from tests.kernels.simd_paths import digest, on_every_path

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def over_array(function: Callable[[Any], Any]) -> Callable[[F32, F32], None]:
    @kernel("void(f32[::1], f32[::1])")
    def apply(x: F32, out: F32) -> None:
        for i in range(0, x.size, 16):
            n = min(16, x.size - i)
            store16_n(out, i, function(load16_n(x, i, n)), n)

    return apply


@inline
def tanh16(x: Any) -> Any:
    numerator, denominator = mathfn.tanh_fraction16(x)
    return numerator / denominator


def tanh(x: F64) -> F64:
    return np.tanh(x)


CASES: dict[str, tuple[Callable[[F32, F32], None], Callable[[F64], F64], float]] = {
    "exp": (over_array(mathfn.exp16), np.exp, 1.1),
    "sigmoid": (over_array(mathfn.sigmoid16), naive.sigmoid, 2.5),
    "silu": (over_array(mathfn.silu16), naive.silu, 3.0),
    "tanh": (over_array(tanh16), tanh, 3.0),
    "softplus": (over_array(mathfn.softplus16), naive.softplus, 2.0),
}


def inputs() -> F32:
    rng = np.random.default_rng(0)
    scaled = rng.standard_normal(20_000) * 10.0 ** rng.uniform(-30, 1, 20_000)
    parts = [rng.uniform(-86, 88.5, 60_000), rng.uniform(-20, 20.5, 60_000), rng.uniform(-1, 1, 60_000), scaled]
    return np.concatenate(parts).astype(np.float32)


def run(name: str, x: F32) -> F32:
    out = np.full_like(x, np.nan)
    CASES[name][0](x, out)
    return out


@pytest.mark.parametrize("name", CASES)
def test_function_is_within_its_stated_ulps_of_float64(name: str) -> None:
    x = inputs()
    _, reference, ulps = CASES[name]
    with np.errstate(under="ignore"):
        expected = reference(x.astype(np.float64))
    error = np.abs(run(name, x) - expected) / np.spacing(np.abs(expected).astype(np.float32))
    assert error.max() < ulps, f"{error.max()} at {x[error.argmax()]}"


@pytest.mark.parametrize(
    ("name", "at_minus_infinity", "at_zero", "at_infinity"),
    [
        ("exp", 0, 1, np.inf),
        ("sigmoid", 0, 0.5, 1),
        ("silu", 0, 0, np.inf),
        ("tanh", -1, 0, 1),
        ("softplus", 0, np.log(2), np.inf),
    ],
)
def test_function_has_its_limits_and_keeps_nan(
    name: str, at_minus_infinity: float, at_zero: float, at_infinity: float
) -> None:
    x = np.array([-np.inf, -3e38, 0.0, -0.0, np.inf, np.nan, -np.nan], np.float32)
    out = run(name, x)
    expected = np.array([at_minus_infinity, at_minus_infinity, at_zero, at_zero, at_infinity], np.float32)
    np.testing.assert_array_equal(out[:5], expected)
    assert np.isnan(out[5:]).all()


def test_exp_goes_through_denormals_to_zero_and_to_infinity_without_a_jump() -> None:
    x = np.linspace(-105, -86, 5_000, dtype=np.float32)
    with np.errstate(under="ignore"):
        expected = np.exp(x.astype(np.float64)).astype(np.float32)
    smallest = np.float32(2.0**-149)
    assert np.abs(run("exp", x).astype(np.float64) - expected).max() <= 1.5 * max(smallest, np.spacing(expected.max()))
    assert (np.diff(run("exp", x)) >= 0).all()
    top = run("exp", np.array([88.72, 88.73, 1e30], np.float32))
    assert np.isfinite(top[0])
    assert np.isinf(top[1:]).all()


def test_softplus_is_the_identity_above_its_threshold() -> None:
    x = np.array([20.0, 20.000002, 1e3], np.float32)
    assert run("softplus", x)[1:].tolist() == x[1:].tolist()


@pytest.mark.parametrize("name", CASES)
def test_a_masked_tail_gives_the_bits_of_a_full_vector(name: str) -> None:
    x = inputs()[:48]
    whole = run(name, x)
    for n in (1, 15, 17, 47):
        np.testing.assert_array_equal(run(name, x[:n].copy()), whole[:n])


def bits() -> str:
    ends = np.array([np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0], np.float32)
    x = np.concatenate([inputs(), np.linspace(-110, 110, 10_001, dtype=np.float32), ends])
    results = [run(name, x) for name in CASES]
    for result in results:
        assert np.isnan(result[-8:-6]).all()
        result[-8:-6] = 0  # which NaN it is, is nobody's promise
    return digest(*results)


def test_every_simd_path_gives_the_same_bits() -> None:
    assert len(set(on_every_path(__name__, "bits").values())) == 1
