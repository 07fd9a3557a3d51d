"""KDA: output and state against float64, and bits that depend on a session's own tokens alone."""

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels import naive, threads
from serai.kernels.kda import BLOCK_TOKENS, STREAM_BYTES, kda, kda_scratch_floats
from serai.kernels.kda_inputs import DECAY, DECAYED_KEY, DECAYED_QUERY, KEY, NUMBERS, VALUE
from serai.kernels.kda_panels import to_matrices, to_panels
from serai.kernels.kda_pass import kda_step
from tests.kernels.kda_case import Case, Inputs, aligned
from tests.kernels.simd_paths import digest, on_every_path

BOUNDS = [-5.0, 0.0]
F32 = NDArray[np.float32]


def error(value: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


def same(a: F32, b: F32) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize(
    ("heads", "head_dim", "tokens"),
    [(1, 16, 3), (3, 32, 35), (2, 48, 1), (2, 64, 17), (2, 80, 20), (1, 128, 33), (2, 20, 18), (1, 70, 2)],
)
def test_output_and_state_match_float64(heads: int, head_dim: int, tokens: int, is_empty: bool, bound: float) -> None:
    case = Case(heads, head_dim, bound)
    x, block = case.inputs(tokens), None if is_empty else case.random_block()
    outs, blocks = case.run([(x, block)])
    out, matrix, tails = case.define(x, block)
    assert error(outs[0], out) < 1e-6
    assert error(case.parts(blocks[0])[0], matrix) < 1e-6
    np.testing.assert_array_equal(case.parts(blocks[0])[1], tails.astype(np.float32))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("shift", [-60.0, -15.0, 15.0, 60.0])
def test_output_and_state_match_float64_at_extreme_gates(bound: float, shift: float) -> None:
    """Decay near 1, near e^-5, and (softplus form) far below the smallest float32."""
    case = Case(2, 64, bound)
    x = case.inputs(40, gate_scale=3)
    x.z += np.float32(shift)
    x.b *= 20
    block = case.random_block()
    outs, blocks = case.run([(x, block)])
    out, matrix, _ = case.define(x, block)
    assert error(outs[0], out) < 3e-6
    assert error(case.parts(blocks[0])[0], matrix) < 3e-6


def one_step_decay(bound: float, z: float) -> float:
    """The factor that a state keeps over one token with no correction, with A_log = 0 and this gate input."""
    case = Case(1, 16, bound)
    case.rate[:], case.bias[:] = 1.0, 0.0
    x = case.inputs(1)
    x.z[:], x.b[:] = z, -np.inf
    block = case.random_block()
    _, blocks = case.run([(x, block)])
    return float(np.median(case.parts(blocks[0])[0] / case.parts(block)[0]))


def test_gate_is_bounded_or_softplus_as_configured() -> None:
    """B08: the bounded gate tends to its bound and is no clamp of the other."""
    assert np.log(one_step_decay(-5.0, 0.0)) == pytest.approx(-2.5, abs=1e-6)
    assert np.log(one_step_decay(0.0, 0.0)) == pytest.approx(-np.log(2), abs=1e-6)
    assert -5 < np.log(one_step_decay(-5.0, 10.0)) < -4.999
    assert np.log(one_step_decay(0.0, 10.0)) < -10


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("tokens", [1, 17, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 1])
def test_one_call_gives_the_bits_of_one_token_at_a_time(tokens: int, bound: float) -> None:
    """B02: whatever the length, also where it is no multiple of a block."""
    case = Case(2, 80, bound)
    x = case.inputs(tokens)
    whole_out, whole = case.feed(x, [tokens])
    step_out, stepped = case.feed(x, [1] * tokens)
    same(whole_out, step_out)
    same(whole, stepped)


def test_any_split_of_a_run_gives_the_same_bits_and_a_zeroed_state_does_not() -> None:
    """B03: 80 tokens as 80, 32+32+16, 79+1, 45+35 and 25+55."""
    case = Case(2, 64, -5.0)
    x = case.inputs(80)
    whole_out, whole = case.feed(x, [80])
    for lengths in ([32, 32, 16], [79, 1], [45, 35], [25, 55]):
        out, block = case.feed(x, lengths)
        same(out, whole_out)
        same(block, whole)
    out, block = case.feed(x.rows(65, 80), [15])
    assert error(out, whole_out[65:]) > 0.1
    assert error(case.parts(block)[1], case.parts(whole)[1]) == 0


def test_a_segments_bits_do_not_depend_on_the_others_their_order_or_the_threads() -> None:
    case = Case(3, 64, -5.0)
    lengths = [1, BLOCK_TOKENS + 1, 5, 1, 2 * BLOCK_TOKENS + 1]
    segments = [(case.inputs(n, seed=i), None if i == 2 else case.random_block(seed=i)) for i, n in enumerate(lengths)]
    alone = [case.run([segment]) for segment in segments]
    before = threads.threads()
    try:
        for count in (1, 2, 3):
            threads.set_threads(count)
            for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 1]):
                outs, blocks = case.run([segments[i] for i in order])
                for i, out, block in zip(order, outs, blocks, strict=True):
                    same(out, alone[i][0][0])
                    same(block, alone[i][1][0])
    finally:
        threads.set_threads(before)


def test_less_scratch_means_fewer_threads_and_the_same_bits() -> None:
    case = Case(4, 64, -5.0)
    x = case.inputs(20)
    many, few = case.run([(x, None)], scratch_threads=8), case.run([(x, None)], scratch_threads=1)
    same(many[0][0], few[0][0])
    same(many[1][0], few[1][0])


def test_states_written_past_the_cache_have_the_same_bits() -> None:
    case = Case(16, 128, -5.0)
    assert case.matrix_floats * 4 >= STREAM_BYTES
    x, block = case.inputs(3), case.random_block()
    columns = case.channels
    proj = np.concatenate([x.q, x.k, x.v], axis=1)
    scratch = aligned(kda_scratch_floats(128, threads.threads()))
    results = []
    for shift in (0, 1):  # a block on a 64-byte boundary takes the streaming stores, the other can't
        new = aligned(case.block_floats + 16)[shift:]
        out = np.full((3, columns), np.nan, np.float32)
        args = (x.z, 0, x.b, 0, x.gate, 0, case.conv, case.rate, case.bias, case.o_norm, case.eps, -5.0, 16, 128)
        addresses = np.array([0, 3]), np.array([block.ctypes.data]), np.array([new.ctypes.data])
        old = case.joined(block)
        addresses[1][0] = old.ctypes.data
        kda(proj, 0, columns, 2 * columns, *args, *addresses, 0, case.matrix_floats, out, 0, scratch)
        results.append((out, new[: len(old)].copy()))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])
    out64, matrix64, _ = case.define(x, block)
    assert error(results[0][0], out64) < 1e-6
    assert error(results[0][1][: case.matrix_floats], to_panels(matrix64).ravel()) < 1e-6


def run_at(case: Case, segments: list[tuple[Inputs, F32 | None]], shift: int) -> tuple[F32, list[F32], F32]:
    """Outputs and new blocks (matrix, then tails) of a batch whose new blocks start `shift` floats past a line, and
    the scratch, which was all NaN."""
    x = Inputs.join([part for part, _ in segments])
    proj = np.concatenate([x.q, x.k, x.v], axis=1)
    olds = [None if block is None else case.joined(block) for _, block in segments]
    floats = case.matrix_floats + 9 * case.channels
    news = [aligned(floats + 16)[shift:] for _ in segments]
    out = np.full((len(x), case.channels), np.nan, np.float32)
    scratch = aligned(kda_scratch_floats(case.head_dim, threads.threads()))
    kda(
        *(proj, 0, case.channels, 2 * case.channels, x.z, 0, x.b, 0, x.gate, 0, case.conv, case.rate, case.bias),
        *(case.o_norm, case.eps, case.lower_bound, case.heads, case.head_dim),
        np.cumsum([0, *(len(part) for part, _ in segments)]),
        np.array([0 if old is None else old.ctypes.data for old in olds]),
        np.array([new.ctypes.data for new in news]),
        *(0, case.matrix_floats, out, 0, scratch),
    )
    return out, [new[:floats].copy() for new in news], scratch


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1, 3, 1, 1, 20, 1], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (44, 80), (410, 20)])
def test_panels_written_while_the_next_is_read_have_the_same_bits(
    heads: int, head_dim: int, lengths: list[int]
) -> None:
    """One-token steps of large states, alone, in a row, and between longer calls and sessions that begin."""
    case = Case(heads, head_dim, -5.0)
    assert case.matrix_floats * 4 >= STREAM_BYTES
    segments = [(case.inputs(n, seed=i), case.random_block(seed=i) if i != 3 else None) for i, n in enumerate(lengths)]
    before = threads.threads()
    try:
        for count in (1, 2, 3):
            threads.set_threads(count)
            outs, blocks, _ = run_at(case, segments, 0)
            plain_outs, plain_blocks, _ = run_at(case, segments, 1)
            same(outs, plain_outs)
            for block, plain in zip(blocks, plain_blocks, strict=True):
                same(block, plain)
    finally:
        threads.set_threads(before)
    first = 0
    for (x, old), new in zip(segments, blocks, strict=True):
        out, matrix, tails = case.define(x, old)
        assert error(outs[first : first + len(x)], out) < 1e-6
        assert error(new[: case.matrix_floats], to_panels(matrix).ravel()) < 1e-6
        np.testing.assert_array_equal(new[case.matrix_floats :], tails.astype(np.float32).ravel())
        first += len(x)


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (44, 80), (410, 20)])
@pytest.mark.parametrize(("shift", "passes"), [(0, True), (1, False)])
def test_one_token_of_a_large_state_takes_the_pass_of_its_own(
    heads: int, head_dim: int, shift: int, passes: bool
) -> None:
    """Without it a step has the same bits, later. It needs no room for a state, and prepared tokens lie there."""
    case = Case(heads, head_dim, -5.0)
    before = threads.threads()
    try:
        threads.set_threads(1)
        _, _, scratch = run_at(case, [(case.inputs(1), case.random_block())], shift)
    finally:
        threads.set_threads(before)
    room = scratch[16:][:head_dim]  # behind the thread's run of tasks
    assert np.isfinite(room).all() == passes
    assert np.isnan(room).all() != passes


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 128), (16, 128), (35, 128), (5, 20)])
def test_the_step_alone_matches_float64(heads: int, head_dim: int) -> None:
    """Decay, delta rule, update and read-out of prepared tokens."""
    rng = np.random.default_rng(heads)
    width = -(-head_dim // 16) * 16
    old = aligned(heads * width * head_dim)
    matrices = rng.standard_normal((heads, head_dim, head_dim))
    old[:] = to_panels(matrices).ravel()
    matrices = matrices.astype(np.float32).astype(np.float64)
    a, k, q, v = rng.uniform(0.2, 1, (4, heads, head_dim))
    beta = rng.uniform(0, 1, heads)
    tokens = aligned(heads * (NUMBERS * width + 16)).reshape(heads, -1)
    tokens[:] = 0
    for row, values in ((DECAY, a), (KEY, k), (DECAYED_KEY, a * k), (DECAYED_QUERY, a * q), (VALUE, v)):
        tokens[:, row * width : row * width + head_dim] = values
    tokens[:, NUMBERS * width], tokens[:, NUMBERS * width + 1] = beta, (q * k).sum(axis=1)
    results = []
    for shift in (0, 32):  # rows of the two states at the same places of a page, and half a page apart
        new, given = aligned(old.size + 1024)[16 * shift :], tokens.copy()
        there = aligned(given.size).reshape(given.shape)
        there[:] = given
        kda_step(there, head_dim, old.ctypes.data, new.ctypes.data)
        assert np.isnan(new[old.size :]).all()
        results.append((there[:, VALUE * width :][:, :head_dim].copy(), new[: old.size].copy()))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])
    decayed = a[:, :, None] * matrices
    u = beta[:, None] * (v - np.einsum("hkv,hk->hv", decayed, k))
    after = decayed + k[:, :, None] * u[:, None, :]
    o, panels = results[0]
    assert error(o, np.einsum("hkv,hk->hv", after, q)) < 1e-6
    assert error(to_matrices(panels.reshape(-1, head_dim, 16), heads, head_dim), after) < 1e-6


def features(case: Case, x: Inputs) -> tuple[NDArray[np.float64], ...]:
    """q, k, v, beta after convolution and norms, per head, by the definition."""
    weights, tokens = case.weights(), len(x)
    tail = np.zeros((3, case.channels))
    q, k, v = (
        naive.short_conv(part.astype(np.float64), weights.conv[i], tail)[0].reshape(tokens, case.heads, -1)
        for i, part in enumerate((x.q, x.k, x.v))
    )
    return naive.l2_norm(q) / np.sqrt(case.head_dim), naive.l2_norm(k), v, naive.sigmoid(x.b.astype(np.float64))


def finish(case: Case, x: Inputs, o: NDArray[np.float64]) -> NDArray[np.float64]:
    """The gated norm of raw outputs [T, H, D]."""
    gate = naive.sigmoid(x.gate.astype(np.float64)).reshape(o.shape)
    return (naive.rms_norm(o, case.o_norm, case.eps) * gate).reshape(len(x), -1)


def test_one_decay_a_head_is_gated_deltanet() -> None:
    case = Case(2, 32, 0.0)
    case.bias[:] = 0
    x = case.inputs(30)
    x.z[:] = np.repeat(x.z[:, :: case.head_dim], case.head_dim, axis=1)
    q, k, v, beta = features(case, x)
    alpha = np.exp(-case.rate * naive.softplus(x.z[:, :: case.head_dim].astype(np.float64)))
    S, o = np.zeros((2, 32, 32)), np.zeros((30, 2, 32))
    for t in range(30):
        for h in range(2):
            erase = np.eye(32) - beta[t, h] * np.outer(k[t, h], k[t, h])
            S[h] = alpha[t, h] * erase @ S[h] + beta[t, h] * np.outer(k[t, h], v[t, h])
            o[t, h] = S[h].T @ q[t, h]
    outs, blocks = case.run([(x, None)])
    assert error(outs[0], finish(case, x, o)) < 1e-6
    assert error(case.parts(blocks[0])[0], S) < 1e-6


def test_no_decay_is_deltanet() -> None:
    case = Case(2, 32, -5.0)
    x = case.inputs(30)
    x.z[:] = -200  # sigmoid(rate * z) = 0: a = 1
    q, k, v, beta = features(case, x)
    S, o = np.zeros((2, 32, 32)), np.zeros((30, 2, 32))
    for t in range(30):
        for h in range(2):
            S[h] += beta[t, h] * np.outer(k[t, h], v[t, h] - S[h].T @ k[t, h])
            o[t, h] = S[h].T @ q[t, h]
    outs, blocks = case.run([(x, None)])
    assert error(outs[0], finish(case, x, o)) < 1e-6
    assert error(case.parts(blocks[0])[0], S) < 1e-6


def test_no_decay_and_orthogonal_keys_is_linear_attention() -> None:
    """Where no key meets an earlier one there is nothing to correct, and the state is the sum of beta k v'."""
    tokens = 8
    case = Case(1, 32, -5.0)
    case.conv[:2, :3] = 0  # q and k see only the newest token
    case.conv[:2, 3] = 1
    x = case.inputs(tokens)
    x.z[:] = -200
    x.k[:] = 0
    x.k[np.arange(tokens), np.arange(tokens) * 3] = 4.0
    q, k, v, beta = features(case, x)
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    o = np.tril(q @ k.T) * beta[:, 0] @ v
    outs, blocks = case.run([(x, None)])
    assert error(outs[0], finish(case, x, o[:, None])) < 1e-6
    assert error(case.parts(blocks[0])[0][0], (k * beta).T @ v) < 1e-6


def test_a_strided_or_wrongly_typed_state_table_is_refused() -> None:
    """B07: the state is reached by address, so no array of it can be copied; the arrays that are passed are refused."""
    case, x = Case(1, 16, -5.0), Case(1, 16, -5.0).inputs(1)
    block, scratch, out = case.random_block(), aligned(kda_scratch_floats(16, 1)), aligned(16).reshape(1, 16)
    proj = np.concatenate([x.q, x.k, x.v], axis=1)
    head = (0, 16, 32, x.z, 0, x.b, 0, x.gate, 0, case.conv, case.rate, case.bias, case.o_norm, 1e-5, -5.0, 1, 16)
    starts, at = np.array([0, 1]), np.array([block.ctypes.data])
    tail = (0, case.matrix_floats, out, 0, scratch)
    with pytest.raises(TypeError):
        kda(np.asfortranarray(np.repeat(proj, 2, 0))[:1], *head, starts, at, at, *tail)
    with pytest.raises(TypeError):
        kda(proj.astype(np.float64), *head, starts, at, at, *tail)
    with pytest.raises(TypeError):
        kda(proj, *head, starts, at.astype(np.uint64), at, *tail)
    with pytest.raises(ValueError, match="scratch"):
        kda(proj, *head, starts, at, at, *tail[:4], scratch[:100])


def test_three_steps_advance_the_sessions_own_bytes_each_time() -> None:
    """B07: never a copy that advances while the pool stands still."""
    case = Case(1, 16, -5.0)
    x, block = case.inputs(3), case.random_block()
    seen = {block.tobytes()}
    for t in range(3):
        _, blocks = case.run([(x.rows(t, t + 1), block)])
        block = blocks[0]
        seen.add(block.tobytes())
    assert len(seen) == 4


def bits() -> str:
    results: list[F32] = []
    for heads, head_dim, bound in ((2, 64, -5.0), (1, 80, 0.0), (1, 20, -5.0)):
        case = Case(heads, head_dim, bound)
        outs, blocks = case.run(
            [(case.inputs(2 * BLOCK_TOKENS + 3), case.random_block()), (case.inputs(1, seed=5), None)]
        )
        results += [np.nan_to_num(array) for array in (*outs, *blocks)]
    for heads, head_dim in ((16, 128), (410, 20)):  # written past the cache
        case = Case(heads, head_dim, -5.0)
        out, (block,), _ = run_at(case, [(case.inputs(1), case.random_block())], 0)
        results += [out, block]
    return digest(*results)


def test_every_simd_path_gives_the_same_bits() -> None:
    assert len(set(on_every_path(__name__, "bits").values())) == 1
