"""Kimi Delta Attention of one layer: everything between its input projections and its output projection.

For each token and head (`kernels/naive.py` is the definition; `kernels/kda_inputs.py` prepares q, k, v, the decay a
and the strength beta), with S the head's state `[D_key, D_value]`:

    w = S'(a k),  z = S'(a q)          one pass over the state
    u = beta (v - w)
    S <- a S + k u'                    a second pass, from cache
    o = z + (q.k) u                    which spares a pass over the new state

and the gated norm of o. Columns of S never meet, so a state lies in panels of sixteen columns, and a few of them stay
in cache while a block of tokens passes through in order: the operations, and so the bits, of one token at a time. The
first token reads the session's old block and the last one writes its new block, which makes the copy that a fork needs
free. One token of states that come from memory has a pass of its own, `kernels/kda_pass.py`.

Every sum runs over key channels in ascending order (w, z) or over sixteen lanes of ascending channels and then by
halves (norms, q.k), whatever else is in the batch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel
from serai.kernels.kda_inputs import (
    NUMBERS,
    TAPS,
    VALUE,
    KdaLayer,
    ask_for_next,
    padded,
    prepare,
    stream_of,
    token_floats,
    write_tail,
)
from serai.kernels.kda_panels import PANEL, panels_of
from serai.kernels.kda_pass import BUNDLE, step_heads
from serai.kernels.kda_state import TOGETHER, state_floats, through_four, through_one
from serai.kernels.lanes import LINE_BYTES, fill_zero, load_lanes, store_lanes, stream_fence, sum_of_squares
from serai.kernels.mathfn import sigmoid16
from serai.kernels.memory import addr
from serai.kernels.norms import inverse_rms
from serai.kernels.runs import deal, take, take_some
from serai.kernels.simd import splat_f32
from serai.kernels.threads import parallel_for

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

BLOCK_TOKENS = 32
"""Tokens prepared before a panel passes through them; decides no bits.

Between two blocks the state is written and read once more than it would be within one; prepared tokens, 84 KB at
D = 128, and all panels, 64 KB, stay in the second-level cache.
"""

# A layer's states this large won't be in cache at the next token: written past it they cost one transfer, not two.
STREAM_BYTES = 1 << 20

# State elements times tokens below which waking other threads costs more than it saves.
SPREAD_WORK = 1 << 15


@inline
def _slot_floats(head_dim: int) -> int:
    """Scratch of one thread: a head's state, a row of zeros, the prepared tokens."""
    return state_floats(head_dim) + padded(head_dim) + BLOCK_TOKENS * token_floats(head_dim)


def kda_scratch_floats(head_dim: int, thread_count: int) -> int:
    """Length of the float32 `scratch` of `kda`. Nothing needs to be in it, and nothing of use is left in it."""
    width = panels_of(head_dim) * PANEL
    slot = width * (head_dim + 1) + BLOCK_TOKENS * (NUMBERS * width + 16)
    return 16 + thread_count * (16 + slot)


@inline
def _old_state(layer: KdaLayer, segment: int, head: int) -> Any:
    """Byte address of a head's state before the call; 0 in an empty session."""
    block = layer.state_in[segment]
    if block:
        return block + 4 * (layer.kda_offset + head * state_floats(layer.head_dim))
    return 0


@inline
def _new_state(layer: KdaLayer, segment: int, head: int) -> Any:
    """Byte address of a head's state after the call."""
    return layer.state_out[segment] + 4 * (layer.kda_offset + head * state_floats(layer.head_dim))


@inline
def _pass_block(
    layer: KdaLayer, segment: int, head: int, first: int, count: int, waiting: int, tokens: int, past_cache: bool
) -> None:
    """`count` prepared tokens, from the call's token `first`, through all panels of a head.

    Between blocks of tokens the state lies at `waiting`.
    """
    head_dim = layer.head_dim
    source, target = waiting, waiting
    if first == 0:
        source = _old_state(layer, segment, head)
        if not source:
            fill_zero(waiting, state_floats(head_dim))
            source = waiting
    if first + count == layer.seg_start[segment + 1] - layer.seg_start[segment]:
        target = _new_state(layer, segment, head)
    column = 0
    while column < head_dim:
        at = 4 * column * head_dim
        if padded(head_dim) - column >= PANEL * TOGETHER:
            through_four(source + at, waiting + at, target + at, tokens, count, head_dim, column, past_cache)
            column += PANEL * TOGETHER
        else:
            through_one(source + at, waiting + at, target + at, tokens, count, head_dim, column)
            column += PANEL


@inline
def _gated_norm(layer: KdaLayer, row: int, head: int, o: int) -> None:
    """o / rms(o) * weight * sigmoid(gate) of one head of one token to its place in `out`."""
    head_dim = layer.head_dim
    out = addr(layer.out, row * layer.out.shape[1] + layer.out_col + head * head_dim)
    gate = addr(layer.gate_src, row * layer.gate_src.shape[1] + layer.gate_col + head * head_dim)
    weight = addr(layer.o_norm, 0)
    scale = splat_f32(inverse_rms(sum_of_squares(o, head_dim), head_dim, layer.eps))
    for c in range(0, 4 * head_dim, 64):
        n = head_dim - c // 4
        normed = load_lanes(o + c, n) * scale * load_lanes(weight + c, n)
        store_lanes(out + c, normed * sigmoid16(load_lanes(gate + c, n)), n)


@inline
def _streams(layer: KdaLayer, segment: int) -> Any:
    """Whether a segment's new state is written past the cache."""
    state_bytes = 4 * layer.heads * state_floats(layer.head_dim)
    new = layer.state_out[segment] + 4 * layer.kda_offset
    return state_bytes >= STREAM_BYTES and new % LINE_BYTES == 0


@inline
def _is_one_step(layer: KdaLayer, segment: int) -> Any:
    """Whether a segment is one token after a state that lies in memory rather than in cache."""
    if layer.state_in[segment] == 0:
        return False
    return layer.seg_start[segment + 1] - layer.seg_start[segment] == 1 and _streams(layer, segment)


@inline
def _streams_of(layer: KdaLayer, task: int, zeros: int) -> Any:
    """The inputs of q, k and v of a segment's head."""
    segment, head = task // layer.heads, task % layer.heads
    return (
        stream_of(layer, 0, layer.q_col, segment, head, zeros),
        stream_of(layer, 1, layer.k_col, segment, head, zeros),
        stream_of(layer, 2, layer.v_col, segment, head, zeros),
    )


@inline
def _prepare_step(layer: KdaLayer, task: int, token: int) -> None:
    """Prepare the token of a one-token task and write its tails; asks for what its neighbour needs."""
    segment, head, head_bytes = task // layer.heads, task % layer.heads, 4 * layer.head_dim
    q, k, v = _streams_of(layer, task, 0)
    ask_for_next(q, head_bytes)
    ask_for_next(k, head_bytes)
    ask_for_next(v, head_bytes)
    prepare(layer, q, k, v, 0, layer.seg_start[segment], head, token)
    tails = layer.state_out[segment] + 4 * layer.conv_offset
    _write_tails(layer, q, k, v, segment, head, 1, (tails | head_bytes) % LINE_BYTES == 0)


@inline
def _steps(layer: KdaLayer, first: int, past: int, tokens: int) -> None:
    """The one-token tasks from `first` to before `past`, heads of one segment."""
    head_dim, token_bytes = layer.head_dim, 4 * token_floats(layer.head_dim)
    segment, head = first // layer.heads, first % layer.heads
    for task in range(first, past):
        _prepare_step(layer, task, tokens + (task - first) * token_bytes)
    old, new = _old_state(layer, segment, head), _new_state(layer, segment, head)
    step_heads(old, new, tokens, past - first, head_dim)
    for task in range(first, past):
        o = tokens + (task - first) * token_bytes + VALUE * 4 * padded(head_dim)
        _gated_norm(layer, layer.seg_start[segment], task % layer.heads, o)


@inline
def _write_tails(layer: KdaLayer, q: Any, k: Any, v: Any, segment: int, head: int, rows: int, past_cache: bool) -> None:
    tails = layer.state_out[segment] + 4 * (layer.conv_offset + head * layer.head_dim)
    stream_bytes = (TAPS - 1) * 4 * layer.heads * layer.head_dim
    write_tail(q, rows, layer.head_dim, tails, past_cache)
    write_tail(k, rows, layer.head_dim, tails + stream_bytes, past_cache)
    write_tail(v, rows, layer.head_dim, tails + 2 * stream_bytes, past_cache)


@inline
def _head(layer: KdaLayer, segment: int, head: int, scratch: int) -> None:
    """All tokens of one segment through one head."""
    head_dim = layer.head_dim
    waiting = scratch
    zeros = waiting + 4 * state_floats(head_dim)
    tokens = zeros + 4 * padded(head_dim)
    fill_zero(zeros, padded(head_dim))
    first_row = layer.seg_start[segment]
    rows = layer.seg_start[segment + 1] - first_row
    q, k, v = _streams_of(layer, segment * layer.heads + head, zeros)
    streams = _streams(layer, segment)
    for first in range(0, rows, BLOCK_TOKENS):
        count = min(BLOCK_TOKENS, rows - first)
        for i in range(count):
            t = first + i
            prepare(layer, q, k, v, t, first_row + t, head, tokens + i * 4 * token_floats(head_dim))
        _pass_block(layer, segment, head, first, count, waiting, tokens, streams and first + count == rows)
        for i in range(count):
            o = tokens + 4 * (i * token_floats(head_dim) + VALUE * padded(head_dim))
            _gated_norm(layer, first_row + first + i, head, o)
    _write_tails(layer, q, k, v, segment, head, rows, False)


@inline
def _next_tasks(runs: int, workers: int, worker: int, most: int) -> Any:
    """The worker's next tasks, `most` at most, or one from the far end of another's run: from and to before."""
    first, past = take_some(runs + LINE_BYTES * worker, most)
    for turn in range(1, workers):
        if first < past:
            break
        first = take(runs + LINE_BYTES * ((worker + turn) % workers), False)
        past = first + 1 if first >= 0 else first
    return first, past


@inline
def _worker(worker: int, workers: int, bundle: int, layer: KdaLayer, runs: int, slots: int) -> None:
    """Take heads of segments until none is left, `bundle` at a time, with the worker's own scratch.

    A worker's heads are neighbours, so that what it and the hardware fetch ahead is what it needs next. Every other
    worker begins with fewer: while one prepares tokens, the next one has the memory.
    """
    scratch = slots + worker * 4 * _slot_floats(layer.head_dim)
    task, past = _next_tasks(runs, workers, worker, bundle if worker % 2 == 0 else max(1, bundle // 4))
    while task < past:
        segment = task // layer.heads
        if _is_one_step(layer, segment):
            end = min(past, (segment + 1) * layer.heads)
            _steps(layer, task, end, scratch)
            task = end
        else:
            _head(layer, segment, task % layer.heads, scratch)
            task += 1
        if task == past:
            task, past = _next_tasks(runs, workers, worker, bundle)
    # What was written past the cache is there before the layer is said to be done.
    stream_fence()


@kernel(
    "void(f32[:, ::1], i64, i64, i64, f32[:, ::1], i64, f32[:, ::1], i64, f32[:, ::1], i64, f32[:, :, ::1], f32[::1],"
    "f32[::1], f32[::1], f32, f32, i64, i64, i64[::1], i64[::1], i64[::1], i64, i64, f32[:, ::1], i64, f32[::1])",
    before=threads.start,
)
def kda(
    proj: F32,
    q_col: int,
    k_col: int,
    v_col: int,
    z: F32,
    z_col: int,
    beta_src: F32,
    beta_col: int,
    gate_src: F32,
    gate_col: int,
    conv_w: F32,
    decay_rate: F32,
    dt_bias: F32,
    o_norm: F32,
    eps: float,
    lower_bound: float,
    heads: int,
    head_dim: int,
    seg_start: I64,
    state_in: I64,
    state_out: I64,
    kda_offset: int,
    conv_offset: int,
    out: F32,
    out_col: int,
    scratch: F32,
) -> None:
    """One KDA layer over a ragged batch of R rows; C = heads * head_dim.

    `proj [R, >= C from q_col, k_col, v_col]` the raw q, k, v; `z [R, C from z_col]` the decay projection without its
    bias; `beta_src [R, heads from beta_col]` and `gate_src [R, C from gate_col]` the raw correction strength and
    output gate. `conv_w [3 (q, k, v), 4 taps (oldest first), C]`; `decay_rate [heads]` = exp(A_log); `dt_bias [C]`;
    `o_norm [head_dim]`. `lower_bound` 0 selects the softplus gate. Result: `out[:, out_col : out_col + C]`.

    Segment s has rows seg_start[s]..seg_start[s+1], at least one. `state_in[s]`, `state_out[s]` are the byte
    addresses of a session's float32 block before (0: empty) and after, never the same; in it, counted in floats, the
    layer's states start at `kda_offset`, in panels `[heads * panels, D_key, 16]` (`kernels/kda_panels.py`), and its
    conv tails `[3 (q, k, v), 3 (oldest first), C]` at `conv_offset`; both are written whole. Blocks whose address and
    offsets are multiples of 64 bytes are much faster.

    `scratch`: `kda_scratch_floats(head_dim, threads)`; with less than that, fewer threads work. Raises ValueError if
    it is too small for one.
    """
    slot_count = (scratch.size - 16) // (16 + _slot_floats(head_dim))
    if slot_count < 1:
        raise ValueError("kda needs kda_scratch_floats(head_dim, threads) floats of scratch")
    layer = KdaLayer(
        proj,
        q_col,
        k_col,
        v_col,
        z,
        z_col,
        beta_src,
        beta_col,
        gate_src,
        gate_col,
        conv_w,
        decay_rate,
        dt_bias,
        o_norm,
        eps,
        lower_bound,
        heads,
        head_dim,
        seg_start,
        state_in,
        state_out,
        kda_offset,
        conv_offset,
        out,
        out_col,
    )
    tasks = (seg_start.size - 1) * heads
    workers = min(slot_count, tasks)
    runs = (addr(scratch, 0) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    for worker in range(workers):
        deal(runs + LINE_BYTES * worker, worker * tasks // workers, (worker + 1) * tasks // workers)
    rows = seg_start[seg_start.size - 1] - seg_start[0]
    spread = rows * heads * head_dim * head_dim > SPREAD_WORK
    bundle = 1
    if rows == seg_start.size - 1:
        bundle = max(1, min(BUNDLE, tasks // (2 * workers)))
    parallel_for(workers, spread, _worker, (workers, bundle, layer, runs, runs + LINE_BYTES * slot_count))
