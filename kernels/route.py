"""Which experts a row visits, and which rows an expert serves.

The router is never quantised. Ties take the lowest expert; an expert whose score is NaN comes last (its weight stays
NaN). A row's picks are written in ascending expert id, the order in which their outputs are summed.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.chains import stack_bytes
from serai.kernels.compile import inline, kernel
from serai.kernels.mathfn import sigmoid16
from serai.kernels.memory import (
    addr,
    f32_at,
    f32_at_n,
    scalar_f32_at,
    scalar_i32_at,
    store_at,
    store_scalar_f32_at,
    store_scalar_i32_at,
)
from serai.kernels.simd import any_of, first_n, hmax, select, splat_f32, vmax
from serai.kernels.threads import parallel_for

MAX_EXPERTS = 4096
"""The most experts a layer may have: a row's scores are kept on the stack."""
_SCORE_BYTES = 4 * MAX_EXPERTS
_TAKEN = -np.inf
_LOWEST = float(np.finfo(np.float32).min)


@inline
def _best(scores: int, n: int) -> Any:
    """The lowest index of the largest of ``n`` scores (padded to 16 with -inf)."""
    top = splat_f32(_TAKEN)
    for i in range(0, n, 16):
        top = vmax(f32_at(scores + 4 * i), top)
    largest = splat_f32(hmax(top))
    first = 0
    for i in range(0, n, 16):
        if any_of(f32_at(scores + 4 * i) == largest):
            first = i
            break
    while scalar_f32_at(scores + 4 * first) != hmax(top):
        first += 1
    return first


@inline
def _drop_groups(scores: int, experts: int, n_group: int, topk_group: int) -> None:
    """Take all but the ``topk_group`` groups with the largest sum of their two best scores out of play."""
    size = experts // n_group
    sums = stack_bytes(_SCORE_BYTES)
    for i in range(0, n_group, 16):
        store_at(sums + 4 * i, splat_f32(_TAKEN))
    for group in range(n_group):
        first = second = np.float32(_TAKEN)
        for i in range(group * size, (group + 1) * size):
            score = scalar_f32_at(scores + 4 * i)
            if score > first:
                first, second = score, first
            elif score > second:
                second = score
        store_scalar_f32_at(sums + 4 * group, first + second if size > 1 else first)
    for _ in range(topk_group):
        kept = _best(sums, n_group)
        store_scalar_f32_at(sums + 4 * kept, np.float32(np.nan))
    for group in range(n_group):
        total = scalar_f32_at(sums + 4 * group)
        if total == total:
            for i in range(group * size, (group + 1) * size):
                store_scalar_f32_at(scores + 4 * i, np.float32(_TAKEN))


@inline
def _route_row(row: int, logits: int, pitch: int, bias: int, sizes: Any, groups: Any, weighting: Any, out: Any) -> None:
    """One row; ``sizes = (experts, k)``, ``groups = (n_group, topk_group)``, ``weighting = (renormalize, scale)``."""
    experts, k = sizes
    renormalize, scale = weighting
    ids, weights = out[0] + row * 4 * k, out[1] + row * 4 * k
    logits += row * pitch
    strengths, scores = stack_bytes(_SCORE_BYTES), stack_bytes(_SCORE_BYTES)
    for e in range(0, experts, 16):
        left = experts - e
        strength = sigmoid16(f32_at_n(logits + 4 * e, left))
        store_at(strengths + 4 * e, strength)
        # NaN and -inf become the lowest finite number, so that -inf can mean "not to be picked".
        score = vmax(strength + f32_at_n(bias + 4 * e, left), _LOWEST)
        store_at(scores + 4 * e, select(first_n(left), score, splat_f32(_TAKEN)))
    if groups[0] > groups[1]:
        _drop_groups(scores, experts, groups[0], groups[1])
    for j in range(k):
        picked = _best(scores, experts)
        store_scalar_f32_at(scores + 4 * picked, np.float32(_TAKEN))
        at = j
        while at > 0 and scalar_i32_at(ids + 4 * (at - 1)) > picked:
            store_scalar_i32_at(ids + 4 * at, scalar_i32_at(ids + 4 * (at - 1)))
            at -= 1
        store_scalar_i32_at(ids + 4 * at, picked)
    total = np.float32(0.0)
    for j in range(k):
        strength = scalar_f32_at(strengths + 4 * scalar_i32_at(ids + 4 * j))
        store_scalar_f32_at(weights + 4 * j, strength)
        total += strength
    divisor = total + np.float32(1e-20) if renormalize and k > 1 else np.float32(1.0)
    for j in range(k):
        store_scalar_f32_at(weights + 4 * j, scalar_f32_at(weights + 4 * j) / divisor * scale)


@kernel("void(f32[:, ::1], i64, f32[::1], i64, i64, i64, b1, f32, i32[:, ::1], f32[:, ::1])", before=threads.start)
def _route(
    logits: NDArray[np.float32],
    col: int,
    bias: NDArray[np.float32],
    k: int,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    scale: float,
    out_ids: NDArray[np.int32],
    out_weights: NDArray[np.float32],
) -> None:
    rows, experts = out_ids.shape[0], bias.size
    out = (addr(out_ids, 0), addr(out_weights, 0))
    args = (addr(logits, col), 4 * logits.shape[1], addr(bias, 0))
    settings = ((experts, k), (n_group, topk_group), (renormalize, scale))
    parallel_for(rows, rows * experts > 1 << 12, _route_row, (*args, *settings, out))


def route(
    logits: NDArray[np.float32],
    col: int,
    bias: NDArray[np.float32],
    k: int,
    n_group: int,
    topk_group: int,
    renormalize: bool,
    scale: float,
    out_ids: NDArray[np.int32],
    out_weights: NDArray[np.float32],
) -> None:
    """Pick ``k`` experts a row: those with the largest sigmoid(logit) + bias, weighted by sigmoid(logit) alone.

    ``logits`` float32 ``[R, W]``, the ``E`` of a row from ``col``; ``bias`` float32 ``[E]``. With ``n_group`` above
    ``topk_group`` only the groups with the largest sums of two best scores take part. Weights are divided by their sum
    plus 1e-20 if ``renormalize`` (and k > 1), then multiplied by ``scale``. Results: int32 and float32 ``[R, k]``, in
    ascending expert id. Raises ValueError when the sizes do not fit.
    """
    rows, experts = len(logits), bias.size
    if not 0 < experts <= MAX_EXPERTS:
        raise ValueError(f"a layer may have 1 to {MAX_EXPERTS} experts, not {experts}.")
    if n_group < 1 or experts % n_group or not 0 < topk_group <= n_group:
        raise ValueError(f"{experts} experts cannot be in {n_group} groups of which {topk_group} take part.")
    if not 0 < k <= experts // n_group * topk_group:
        raise ValueError(f"cannot pick {k} of {experts // n_group * topk_group} experts.")
    if col < 0 or col + experts > logits.shape[1]:
        raise ValueError(f"logits of shape {list(logits.shape)} have no {experts} columns from {col}.")
    if out_ids.shape != (rows, k) or out_weights.shape != (rows, k):
        raise ValueError(f"picks must have shape {[rows, k]}, not {out_ids.shape} and {out_weights.shape}.")
    _route(logits, col, bias, k, n_group, topk_group, renormalize, scale, out_ids, out_weights)


@kernel("void(i32[:, ::1], i64, i32[::1], i32[::1], i32[::1], i32[::1])")
def _group(
    ids: NDArray[np.int32],
    n_experts: int,
    experts: NDArray[np.int32],
    start: NDArray[np.int32],
    pairs: NDArray[np.int32],
    found: NDArray[np.int32],
) -> None:
    rows, k = ids.shape
    ends = stack_bytes(_SCORE_BYTES)
    for e in range(n_experts):
        store_scalar_i32_at(ends + 4 * e, 0)
    for row in range(rows):
        for j in range(k):
            if not 0 <= ids[row, j] < n_experts:
                raise ValueError("a pick is not among the experts")
            at = ends + 4 * ids[row, j]
            store_scalar_i32_at(at, scalar_i32_at(at) + 1)
    total = distinct = 0
    for e in range(n_experts):
        count = scalar_i32_at(ends + 4 * e)
        store_scalar_i32_at(ends + 4 * e, total)
        if count:
            experts[distinct] = e
            start[distinct] = total
            distinct += 1
        total += count
    start[distinct] = total
    for row in range(rows):
        for j in range(k):
            at = ends + 4 * ids[row, j]
            place = scalar_i32_at(at)
            pairs[place] = row * k + j
            store_scalar_i32_at(at, place + 1)
    found[0] = distinct
    for i in range(distinct, min(ids.size, n_experts)):
        experts[i], start[i + 1] = experts[distinct - 1], total


def group(
    ids: NDArray[np.int32],
    n_experts: int,
    experts: NDArray[np.int32],
    start: NDArray[np.int32],
    pairs: NDArray[np.int32],
    found: NDArray[np.int32],
) -> None:
    """Turn each row's picks (``ids`` int32 ``[R, k]``) into each expert's rows; ``found[0]`` experts are visited.

    Expert ``experts[i]`` (ascending) serves the pairs ``pairs[start[i] : start[i + 1]]``, ascending, where pair
    ``row * k + j`` is a row's j-th pick. Places that more different experts would have taken repeat the last one,
    without pairs. Needs room for min(R * k, n_experts) experts, one start more, and R * k pairs.
    Raises ValueError if an array is too small or an id is not an expert.
    """
    most = min(ids.size, n_experts)
    if n_experts > MAX_EXPERTS:
        raise ValueError(f"a layer may have {MAX_EXPERTS} experts, not {n_experts}.")
    if experts.size < most or start.size < most + 1 or pairs.size < ids.size:
        raise ValueError(
            f"{ids.size} picks of {n_experts} experts need {most}, {most + 1} and {ids.size} places, "
            f"not {experts.size}, {start.size} and {pairs.size}."
        )
    if not found.size:
        raise ValueError("found must have room for a number.")
    _group(ids, n_experts, experts, start, pairs, found)


@kernel("void(i64[::1], i32[::1], i64[::1])")
def look_up(addresses: NDArray[np.int64], experts: NDArray[np.int32], out: NDArray[np.int64]) -> None:
    """``out[i] = addresses[experts[i]]``, all of them experts that there are."""
    for i in range(experts.size):
        out[i] = addresses[experts[i]]
