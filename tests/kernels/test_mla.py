"""MLA: latents and outputs against float64, and bits that depend on a session's own tokens up to the row alone."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels import naive, threads
from serai.kernels.latents import store_latents
from serai.kernels.mla import attend
from serai.kernels.mla_line import mla_scratch_floats
from serai.kernels.mla_pairs import SPLIT
from tests.kernels.mla_case import LAYER, LAYERS, Session, Tables, feed, run, store
from tests.kernels.simd_paths import digest, on_every_path

F32 = NDArray[np.float32]
KINDS = [(4, False), (2, False), (2, True), (1, False), (1, True)]
"""Bytes of a latent, and whether products are of pairs."""
BORDERS = [1, 2, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 5]


def error(value: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


def same(a: F32, b: F32) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("latent_bytes", [4, 2, 1])
@pytest.mark.parametrize(("kv_lora", "rope"), [(64, 32), (512, 64), (20, 3), (16, 0)])
def test_latents_are_normed_and_stored_where_they_belong(kv_lora: int, rope: int, latent_bytes: int) -> None:
    session = Session(2, kv_lora, rope, 21, page_tokens=8, latent_bytes=latent_bytes)
    store([(session, 0, 5)])
    store([(session, 5, 21)])
    expected = naive.mla_latents(session.proj.astype(np.float64), session.norm_w.astype(np.float64), 1e-6)
    if latent_bytes == 1:
        _, scales = session.coded(session.latents())
        steps = np.repeat(scales, (kv_lora, rope), axis=1)
        assert (np.abs(session.widened() - expected) <= 0.5001 * steps).all()
    else:
        np.testing.assert_allclose(session.widened(), expected, rtol=1e-6 if latent_bytes == 4 else 2.0**-8, atol=1e-7)
    stored = np.stack(session.pages)
    whole = session.widen(stored.reshape(-1, session.row)).reshape(*stored.shape[:-1], session.width)
    assert np.isnan(np.delete(whole, LAYER, axis=1)).all(), "another layer was written"
    assert np.isnan(whole[-1, LAYER, 21 % 8 :]).all(), "a row past the last token was written"
    assert whole.shape[1] == LAYERS


def test_bfloat16_latents_are_the_float32_ones_rounded_once_and_nan_is_kept() -> None:
    exact, rounded = Session(1, 64, 16, 9), Session(1, 64, 16, 9, latent_bytes=2)
    exact.proj[4, 70] = rounded.proj[4, 70] = np.nan
    for session in (exact, rounded):
        store([(session, 0, 9)])
    latents = exact.latents().astype(np.float32)
    np.testing.assert_array_equal(rounded.latents(), naive.bf16_round(latents))
    assert np.isnan(rounded.widened()[4, 70])


@pytest.mark.parametrize(("kv_lora", "rope"), [(64, 32), (512, 64), (20, 3), (16, 0), (5, 30)])
def test_8_bit_latents_are_the_float32_ones_as_codes_of_two_scales(kv_lora: int, rope: int) -> None:
    """By the definition, to the bit: also where a part is all zero, tiny, infinite or not a number."""
    exact, coded = (Session(1, kv_lora, rope, 9, latent_bytes=size) for size in (4, 1))
    for session in (exact, coded):
        session.proj[:, kv_lora:] *= 100  # which are not normed
        session.proj[1] = 0
        session.proj[2, kv_lora:] = 1e-31
        session.proj[3, : kv_lora - 1] = 1e-3
        session.proj[4, 2] = np.nan
        session.proj[5, kv_lora:] = -np.inf
        store([(session, 0, 9)])
    codes, scales = coded.coded(coded.latents())
    expected, units = naive.q8_latents(exact.latents(), kv_lora)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(scales.view(np.uint32), units.view(np.uint32))
    assert np.isnan(coded.widened()[4, :kv_lora]).all()
    assert not np.isnan(coded.widened()[4, kv_lora:]).any()
    assert not coded.widened()[1].any()


@pytest.mark.parametrize("latent_bytes", [4, 2, 1])
@pytest.mark.parametrize(
    ("heads", "kv_lora", "rope"), [(4, 64, 32), (1, 20, 3), (33, 16, 16), (48, 40, 8), (96, 512, 64)]
)
def test_output_matches_float64(heads: int, kv_lora: int, rope: int, latent_bytes: int) -> None:
    tokens = 2 * SPLIT + 5
    session = Session(heads, kv_lora, rope, tokens, latent_bytes=latent_bytes)
    store([(session, 0, tokens)])
    for count in BORDERS:
        first = max(0, count - 6)
        (out,) = run([(session, first, count)])
        assert error(out, session.define(first, count)) < 2e-6


@pytest.mark.parametrize("latent_bytes", [2, 1])
@pytest.mark.parametrize(
    ("heads", "kv_lora", "rope"), [(4, 64, 32), (1, 20, 3), (33, 16, 16), (5, 16, 0), (48, 40, 8), (96, 512, 64)]
)
def test_products_of_pairs_are_those_of_rounded_queries_and_weights(
    heads: int, kv_lora: int, rope: int, latent_bytes: int
) -> None:
    """Within the rounding of bfloat16 of float64; far nearer to it once the queries are rounded there too.

    8-bit latents are rounded as well.
    """
    tokens = 2 * SPLIT + 5
    session = Session(heads, kv_lora, rope, tokens, latent_bytes=latent_bytes, pairs=True)
    rounded = Session(heads, kv_lora, rope, tokens, latent_bytes=latent_bytes, pairs=True)
    rounded.queries = naive.bf16_widen(naive.bf16_round(session.queries))
    for one in (session, rounded):
        store([(one, 0, tokens)])
    for count in BORDERS:
        first = max(0, count - 6)
        (out,) = run([(session, first, count)])
        assert error(out, session.define(first, count)) < 2e-2
        assert error(out, rounded.define(first, count)) < (3e-3 if latent_bytes == 2 else 5e-3)
        same(out, run([(rounded, first, count)])[0])


def test_pairs_of_8_bit_latents_are_those_of_the_same_numbers_in_bfloat16() -> None:
    """Codes become bfloat16 as they are read: an odd border between the parts, an odd width, an odd count."""
    coded = Session(3, 21, 12, SPLIT + 7, latent_bytes=1, pairs=True)
    plain = Session(3, 21, 12, SPLIT + 7, latent_bytes=2, pairs=True)
    store([(coded, 0, coded.tokens)])
    for page, of_codes in zip(plain.pages, coded.pages, strict=True):
        page[LAYER] = naive.bf16_round(coded.widen(of_codes[LAYER]))
    same(run([(coded, 5, coded.tokens)])[0], run([(plain, 5, plain.tokens)])[0])


def test_8_bit_queries_would_cost_as_much_again_as_8_bit_latents_do() -> None:
    """Why codes are not multiplied by dots of 8 bits (`kernels/mla_pairs.py`)."""
    exact, coded = (Session(8, 512, 64, 4 * SPLIT, latent_bytes=size, score_scale=0.05) for size in (4, 1))
    for session in (exact, coded):
        store([(session, 0, session.tokens)])
    last = session.tokens - 1, session.tokens
    right, latents_only = exact.define(*last), coded.define(*last)
    queries = exact.queries.reshape(-1, 576)
    exact.queries = naive.q8_widen(*naive.q8_latents(queries, 512), 512).reshape(exact.queries.shape)
    queries_only = exact.define(*last)
    print(f"8-bit latents {error(latents_only, right):.4f}, 8-bit queries {error(queries_only, right):.4f}")
    assert error(queries_only, right) > 0.8 * error(latents_only, right) > 0.005


def test_pairs_want_bfloat16_or_8_bit_latents() -> None:
    session = Session(2, 16, 16, 3, pairs=True)
    store([(session, 0, 3)])
    with pytest.raises(ValueError, match="pairs are of bfloat16 latents or of 8-bit ones"):
        run([(session, 0, 3)])


def test_codes_of_too_small_a_scale_are_zero_in_pairs() -> None:
    session = Session(2, 16, 16, 9, latent_bytes=1, pairs=True)
    store([(session, 0, 9)])
    outs = []
    for scale in (1e-38, 0.0):
        for page in session.pages:
            page[LAYER, :, session.width + 4 :] = np.array([scale], np.float32).view(np.uint8)
        outs += run([(session, 8, 9)])
    same(*outs)


def test_numbers_too_small_for_pairs_are_zero() -> None:
    """Where the instruction would take denormal numbers for 0 and two multiply-adds would not."""
    session = Session(2, 16, 16, 9, latent_bytes=2, pairs=True)
    store([(session, 0, 9)])
    (full,) = run([(session, 8, 9)])
    for page in session.pages:
        page[LAYER, :, 5:7] = 0x0001  # the smallest there is
    (tiny,) = run([(session, 8, 9)])
    for page in session.pages:
        page[LAYER, :, 5:7] = 0
    (none,) = run([(session, 8, 9)])
    same(tiny, none)
    assert error(none, full) > 0.01
    assert not none.reshape(2, 16)[:, 5:7].any()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 3.0, 40.0])
def test_flat_and_peaked_attention_match_float64(scale: float) -> None:
    """B109: scores that leave all other weights at 0 (or denormal) give no NaN."""
    session = Session(4, 64, 32, SPLIT + 30, score_scale=scale)
    store([(session, 0, session.tokens)])
    (out,) = run([(session, SPLIT, session.tokens)])
    assert error(out, session.define(SPLIT, session.tokens)) < 2e-5


@pytest.mark.parametrize(("latent_bytes", "pairs"), KINDS)
@pytest.mark.parametrize("heads", [1, 4, 24, 40])
def test_later_tokens_touch_nothing_whatever_they_hold(heads: int, latent_bytes: int, pairs: bool) -> None:
    """B109: masked latents are not multiplied by 0; infinity and NaN in them stay there, in whatever line a row is."""
    session = Session(heads, 64, 32, SPLIT + 20, latent_bytes=latent_bytes, pairs=pairs)
    store([(session, 0, SPLIT + 20)])
    (clean,) = run([(session, 0, SPLIT + 20)], slots=1)
    for value in (np.nan, np.inf, -np.inf, 3e38):
        for token in (SPLIT + 10, SPLIT + 11, SPLIT, SPLIT - 1, 3, 4):
            store([(session, 0, SPLIT + 20)])
            held = np.array([value], np.float32)
            row = session.pages[token // 16][LAYER, token % 16]
            if latent_bytes == 1:
                row[session.width :] = np.repeat(held, 2).view(np.uint8)
            else:
                row[:] = held if latent_bytes == 4 else naive.bf16_round(held)
            (out,) = run([(session, 0, SPLIT + 20)], slots=1)
            same(out[:token], clean[:token])
            (late,) = run([(session, token - 1, token + 2)], slots=1)
            same(late[:1], clean[token - 1 : token])


def test_a_row_that_sees_nothing_of_a_split_keeps_even_the_sign_of_a_zero() -> None:
    """Row SPLIT - 1 next to row SPLIT: a sum of -0, from weights too small for its one negative number, stays it."""
    session = Session(24, 16, 0, SPLIT + 1, page_tokens=SPLIT + 1, score_scale=1.0)
    session.queries[:] = np.tile(np.eye(1, 16, dtype=np.float32), 24)
    latents = session.pages[0][LAYER]
    latents[:] = -1e-10
    latents[:, 0] = -45
    latents[0] = 0
    latents[0, 0] = 45
    (alone,) = run([(session, SPLIT - 1, SPLIT)])
    assert np.signbit(alone.reshape(24, 16)[:, 1:]).all()
    assert not alone.reshape(24, 16)[:, 1:].any()
    (both,) = run([(session, SPLIT - 1, SPLIT + 1)], slots=1)
    same(both[:1], alone)


@pytest.mark.parametrize(("latent_bytes", "pairs"), KINDS)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 35, 64, 65, SPLIT + 3])
def test_one_call_gives_the_bits_of_one_token_at_a_time(tokens: int, latent_bytes: int, pairs: bool) -> None:
    """B02, for latents and outputs."""
    session = Session(3, 64, 32, tokens, latent_bytes=latent_bytes, pairs=pairs)
    whole = feed(session, [tokens])
    latents = session.latents()
    stepped = feed(session, [1] * tokens)
    same(whole, stepped)
    np.testing.assert_array_equal(session.latents().view(np.uint8), latents.view(np.uint8))


def test_any_split_of_a_run_gives_the_same_bits() -> None:
    """B03: 40 tokens as 40, 16+16+8, 39+1 and 25+15; and a run that lost its first window does not."""
    session = Session(4, 64, 32, 40)
    whole = feed(session, [40])
    for lengths in ([16, 16, 8], [39, 1], [25, 15]):
        same(feed(session, lengths), whole)
    session.forget()
    store([(session, 25, 40)])
    for page in session.pages:
        page[np.isnan(page)] = 0
    (out,) = run([(session, 25, 40)])
    assert error(out, whole[25:]) > 0.1


def test_the_size_of_a_page_affects_no_bits() -> None:
    for latent_bytes, pairs in KINDS:
        outs = []
        for page_tokens in (1, 7, 16, 128, 1000):
            session = Session(4, 64, 32, SPLIT + 9, page_tokens=page_tokens, latent_bytes=latent_bytes, pairs=pairs)
            store([(session, 0, session.tokens)])
            outs += run([(session, SPLIT - 2, session.tokens)])
        for out in outs[1:]:
            same(out, outs[0])


@pytest.mark.parametrize(("latent_bytes", "pairs"), KINDS)
@pytest.mark.parametrize("heads", [40, 24, 3])
def test_a_rows_bits_do_not_depend_on_the_batch_its_order_threads_or_scratch(
    heads: int, latent_bytes: int, pairs: bool
) -> None:
    tokens = [5, SPLIT + 40, 1, 70, 2 * SPLIT]
    sessions = [Session(heads, 32, 16, n, seed=i, latent_bytes=latent_bytes, pairs=pairs) for i, n in enumerate(tokens)]
    spans = [(session, max(0, session.tokens - 9 + i), session.tokens) for i, session in enumerate(sessions)]
    store([(session, 0, session.tokens) for session in sessions])
    alone = [run([span])[0] for span in spans]
    before = threads.threads()
    try:
        for count in (1, 2, 3):
            threads.set_threads(count)
            for order, slots in itertools.product(([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]), (1, 2, 7)):
                for i, out in zip(order, run([spans[i] for i in order], slots), strict=True):
                    same(out, alone[i])
    finally:
        threads.set_threads(before)


@pytest.mark.parametrize(("latent_bytes", "pairs"), KINDS)
@pytest.mark.parametrize("heads", [*range(1, 10), 12, 16, 24, 32, 40, 96])
@pytest.mark.parametrize("first", [0, 3, SPLIT - 5])
def test_a_row_alone_gives_the_bits_it_has_among_others(heads: int, first: int, latent_bytes: int, pairs: bool) -> None:
    """Rows stand abreast, end in the middle of a line and of a vector, and part anywhere in a split and at its ends."""
    session = Session(heads, 20, 12, 2 * SPLIT + 12, latent_bytes=latent_bytes, pairs=pairs)
    store([(session, 0, session.tokens)])
    (together,) = run([(session, first, session.tokens)], slots=1)
    for t in range(first, session.tokens):
        same(run([(session, t, t + 1)])[0][0], together[t - first])


def test_wrong_arrays_sizes_and_scratch_are_refused() -> None:
    """B07: an array that would need a private copy never passes."""
    session = Session(2, 16, 16, 3)
    tables = Tables([(session, 0, 3)])
    where = (tables.starts, tables.positions, tables.pages, tables.page_starts, 16, 0, 4 * 32)
    out, scratch = np.zeros((3, 32), np.float32), np.zeros(mla_scratch_floats(16, 16, 1), np.float32)
    with pytest.raises(TypeError):
        attend(session.queries[:, ::2], 0.1, 1, 16, 16, *where, 4, False, out, scratch)
    with pytest.raises(TypeError):
        attend(session.queries, 0.1, 2, 16, 16, *where, 4, False, out.astype(np.float64), scratch)
    with pytest.raises(ValueError, match="bfloat16"):
        attend(session.queries, 0.1, 2, 16, 16, *where, 3, False, out, scratch)
    with pytest.raises(ValueError, match="scratch"):
        attend(session.queries, 0.1, 2, 16, 16, *where, 4, False, out, scratch[:-1])
    with pytest.raises(TypeError):
        store_latents(session.proj.astype(np.float16), 0, session.norm_w, 1e-6, 16, *where, 4)
    with pytest.raises(ValueError, match="bfloat16"):
        store_latents(session.proj, 0, session.norm_w, 1e-6, 16, *where, 8)
    for latent_bytes, row_bytes in ((4, 4 * 32 - 1), (2, 2 * 32 - 1), (1, 32 + 7)):
        near = (*where[:-1], row_bytes)
        with pytest.raises(ValueError, match="more bytes"):
            store_latents(session.proj, 0, session.norm_w, 1e-6, 16, *near, latent_bytes)
        with pytest.raises(ValueError, match="more bytes"):
            attend(session.queries, 0.1, 2, 16, 16, *near, latent_bytes, False, out, scratch)


def bits() -> str:
    """Of two sessions, each row alone as well as among the others: a path fails here where those differ."""
    results: list[F32] = []
    shapes = (
        *((40, 64, 32, 4, False), (3, 20, 3, 2, False), (40, 64, 32, 2, True), (3, 20, 3, 2, True)),
        *((40, 64, 32, 1, False), (3, 20, 3, 1, False), (40, 64, 32, 1, True), (3, 20, 3, 1, True)),
        *((24, 32, 16, 4, False), (24, 32, 16, 2, True), (24, 33, 5, 1, True)),
    )
    for heads, kv_lora, rope, latent_bytes, pairs in shapes:
        session = Session(heads, kv_lora, rope, SPLIT + 21, latent_bytes=latent_bytes, pairs=pairs)
        store([(session, 0, session.tokens)])
        (together,) = run([(session, 3, session.tokens)])
        for t in range(3, session.tokens):
            same(run([(session, t, t + 1)])[0][0], together[t - 3])
        results += [together, session.latents()]
    return digest(*results)


def test_every_simd_path_gives_the_same_bits() -> None:
    assert len(set(on_every_path(__name__, "bits").values())) == 1
