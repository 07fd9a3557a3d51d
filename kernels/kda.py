"""Kimi Delta Attention of one layer: everything between its input projections and its output projection.

For each token and head (`kernels/naive.py` is the definition; `kernels/kda_inputs.py` prepares q, k, v, the decay a
and the strength beta), with S the head's state `[D_key, D_value]`:

    w = S'(a k),  z = S'(a q)          one pass over the state
    u = beta (v - w)
    S <- a S + k u'                    a second pass, from cache
    o = z + (q.k) u                    which spares a pass over the new state

and the gated norm of o. Columns of S never meet, so a panel of 64 of them (32 KB at D = 128) stays in cache while a
block of tokens passes through it in order: the operations, and so the bits, of one token at a time. The first token
reads the session's old block and the last one writes its new block, which makes the copy that a fork needs free;
while a large state is written, the next head's is fetched.

Every sum runs over key channels in ascending order (w, z) or over sixteen lanes of ascending channels and then by
halves (norms, q.k), whatever else is in the batch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.atomic import atomic_add, atomic_store
from serai.kernels.compile import inline, kernel
from serai.kernels.kda_inputs import (
    NUMBERS,
    TAPS,
    VALUE,
    KdaLayer,
    ask_for_inputs,
    padded,
    prepare,
    stream_of,
    token_floats,
    write_tail,
)
from serai.kernels.kda_pass import (
    COLUMNS,
    HAS_WIDE_PASS,
    SUMS_BYTES,
    answer_head,
    read_head,
    write_and_read_head,
    write_head,
)
from serai.kernels.kda_state import PANEL, tokens_16, tokens_64
from serai.kernels.lanes import LINE_BYTES, fill_zero, load_lanes, store_lanes, stream_fence, sum_of_squares
from serai.kernels.mathfn import sigmoid16
from serai.kernels.memory import addr
from serai.kernels.norms import inverse_rms
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
    """Scratch of one thread: a head's state in panels, a row of zeros, the prepared tokens."""
    return padded(head_dim) * (head_dim + 1) + BLOCK_TOKENS * token_floats(head_dim)


def kda_scratch_floats(head_dim: int, thread_count: int) -> int:
    """Length of the float32 `scratch` of `kda`. Nothing needs to be in it, and nothing of use is left in it."""
    width = -(-head_dim // 16) * 16
    slot = width * (head_dim + 1) + BLOCK_TOKENS * (NUMBERS * width + 16)
    return 32 + thread_count * slot


@inline
def _old_state(layer: KdaLayer, segment: int, head: int) -> Any:
    """Byte address of a head's state before the call; 0 in an empty session."""
    block = layer.state_in[segment]
    if block:
        return block + 4 * (layer.kda_offset + head * layer.head_dim * layer.head_dim)
    return 0


@inline
def _pass_block(
    layer: KdaLayer,
    segment: int,
    head: int,
    first: int,
    count: int,
    panels: int,
    tokens: int,
    past_cache: bool,
    ahead: int,
) -> None:
    """`count` prepared tokens, from the call's token `first`, through all columns of a head.

    Between blocks of tokens the state waits in `panels`, one after the other.
    """
    head_dim = layer.head_dim
    is_last = first + count == layer.seg_start[segment + 1] - layer.seg_start[segment]
    new = layer.state_out[segment] + 4 * (layer.kda_offset + head * head_dim * head_dim)
    old = _old_state(layer, segment, head)
    column = 0
    while column < head_dim:
        is_wide = head_dim - column >= PANEL
        panel = panels + 4 * column * head_dim
        panel_bytes = 4 * PANEL if is_wide else LINE_BYTES
        source, source_bytes = panel, panel_bytes
        if first == 0 and old:
            source, source_bytes = old + 4 * column, 4 * head_dim
        elif first == 0:
            fill_zero(panel, panel_bytes // 4 * head_dim)
        target, target_bytes = panel, panel_bytes
        if is_last:
            target, target_bytes = new + 4 * column, 4 * head_dim
        if is_wide:
            asked = ahead + 4 * column * head_dim
            tokens_64(
                source,
                source_bytes,
                panel,
                target,
                target_bytes,
                tokens,
                count,
                head_dim,
                column,
                past_cache,
                asked,
            )
            column += PANEL
        else:
            tokens_16(source, source_bytes, panel, target, target_bytes, tokens, count, head_dim, column)
            column += 16


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
    state_bytes = 4 * layer.heads * layer.head_dim * layer.head_dim
    new = layer.state_out[segment] + 4 * layer.kda_offset
    return state_bytes >= STREAM_BYTES and (new | (4 * layer.head_dim)) % LINE_BYTES == 0


@inline
def _is_one_step(layer: KdaLayer, segment: int) -> Any:
    """Whether a segment is one token after a state, of heads for which `kernels/kda_pass.py` is made."""
    if not HAS_WIDE_PASS or layer.head_dim != COLUMNS or layer.state_in[segment] == 0:
        return False
    return layer.seg_start[segment + 1] - layer.seg_start[segment] == 1 and _streams(layer, segment)


@inline
def _begin_step(layer: KdaLayer, task: int, slot: int, before: int, before_slot: int, ahead: int) -> None:
    """Read the head of a one-token task and answer, writing beside it that of the task `before` (-1: none).

    A slot holds a task's prepared token and its sums.
    """
    segment, head = task // layer.heads, task % layer.heads
    row = layer.seg_start[segment]
    sums = slot + 4 * token_floats(COLUMNS)
    q = stream_of(layer, 0, layer.q_col, segment, head, 0)
    k = stream_of(layer, 1, layer.k_col, segment, head, 0)
    v = stream_of(layer, 2, layer.v_col, segment, head, 0)
    prepare(layer, q, k, v, 0, row, head, slot)
    source = _old_state(layer, segment, head)
    if before >= 0:
        old, new = _step_addresses(layer, before)
        write_and_read_head(old, new, before_slot, before_slot + 4 * token_floats(COLUMNS), source, slot, sums, ahead)
    else:
        read_head(source, slot, sums, ahead)
    answer_head(slot, sums)
    _gated_norm(layer, row, head, slot + VALUE * 4 * padded(COLUMNS))
    tails = layer.state_out[segment] + 4 * layer.conv_offset
    _write_tails(layer, q, k, v, segment, head, 1, tails % LINE_BYTES == 0)


@inline
def _step_addresses(layer: KdaLayer, task: int) -> Any:
    """A head's state before and after the call."""
    segment, head = task // layer.heads, task % layer.heads
    new = layer.state_out[segment] + 4 * (layer.kda_offset + head * COLUMNS * COLUMNS)
    return _old_state(layer, segment, head), new


@inline
def _end_step(layer: KdaLayer, task: int, slot: int) -> None:
    """Write the head of a task that `_begin_step` has read."""
    old, new = _step_addresses(layer, task)
    write_head(old, new, slot, slot + 4 * token_floats(COLUMNS))


@inline
def _write_tails(layer: KdaLayer, q: Any, k: Any, v: Any, segment: int, head: int, rows: int, past_cache: bool) -> None:
    tails = layer.state_out[segment] + 4 * (layer.conv_offset + head * layer.head_dim)
    stream_bytes = (TAPS - 1) * 4 * layer.heads * layer.head_dim
    write_tail(q, rows, layer.head_dim, tails, past_cache)
    write_tail(k, rows, layer.head_dim, tails + stream_bytes, past_cache)
    write_tail(v, rows, layer.head_dim, tails + 2 * stream_bytes, past_cache)


@inline
def _head(layer: KdaLayer, segment: int, head: int, scratch: int, ahead: int) -> None:
    """All tokens of one segment through one head; `ahead` is the state that this worker takes up next."""
    head_dim = layer.head_dim
    panels = scratch
    zeros = panels + 4 * padded(head_dim) * head_dim
    tokens = zeros + 4 * padded(head_dim)
    fill_zero(zeros, padded(head_dim))
    first_row = layer.seg_start[segment]
    rows = layer.seg_start[segment + 1] - first_row
    q = stream_of(layer, 0, layer.q_col, segment, head, zeros)
    k = stream_of(layer, 1, layer.k_col, segment, head, zeros)
    v = stream_of(layer, 2, layer.v_col, segment, head, zeros)
    streams = _streams(layer, segment)
    for first in range(0, rows, BLOCK_TOKENS):
        count = min(BLOCK_TOKENS, rows - first)
        for i in range(count):
            t = first + i
            prepare(layer, q, k, v, t, first_row + t, head, tokens + i * 4 * token_floats(head_dim))
        _pass_block(layer, segment, head, first, count, panels, tokens, streams and first + count == rows, ahead)
        for i in range(count):
            o = tokens + 4 * (i * token_floats(head_dim) + VALUE * padded(head_dim))
            _gated_norm(layer, first_row + first + i, head, o)
    _write_tails(layer, q, k, v, segment, head, rows, False)


@inline
def _worker(worker: int, layer: KdaLayer, counter: int, slots: int) -> None:
    """Take heads of segments until none is left, with the worker's own scratch.

    Of one-token tasks in a row, each is written while the next is read.
    """
    tasks = (layer.seg_start.size - 1) * layer.heads
    scratch = slots + worker * 4 * _slot_floats(layer.head_dim)
    slot = scratch
    other = slot + 4 * token_floats(COLUMNS) + SUMS_BYTES
    unwritten = -1
    task = atomic_add(counter, 1)
    while task < tasks:
        following = atomic_add(counter, 1)
        ahead = 0
        if following < tasks:
            ahead = _old_state(layer, following // layer.heads, following % layer.heads)
            if _is_one_step(layer, following // layer.heads):
                ask_for_inputs(layer, following // layer.heads, following % layer.heads)
        if _is_one_step(layer, task // layer.heads):
            _begin_step(layer, task, slot, unwritten, other, ahead)
            unwritten = task
            slot, other = other, slot
        else:
            if unwritten >= 0:
                _end_step(layer, unwritten, other)
                unwritten = -1
            _head(layer, task // layer.heads, task % layer.heads, scratch, ahead)
        task = following
    if unwritten >= 0:
        _end_step(layer, unwritten, other)
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
    layer's `[heads, D_key, D_value]` starts at `kda_offset` and its conv tails `[3 (q, k, v), 3 (oldest first), C]`
    at `conv_offset`; both are written whole. Blocks whose address and offset make rows 64-byte aligned are much
    faster.

    `scratch`: `kda_scratch_floats(head_dim, threads)`; with less than that, fewer threads work. Raises ValueError if
    it is too small for one.
    """
    counter = (addr(scratch, 0) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    slot_count = (scratch.size - 32) // _slot_floats(head_dim)
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
    atomic_store(counter, 0)
    rows = seg_start[seg_start.size - 1] - seg_start[0]
    workers = min(slot_count, (seg_start.size - 1) * heads)
    spread = rows * heads * head_dim * head_dim > SPREAD_WORK
    parallel_for(workers, spread, _worker, (layer, counter, counter + LINE_BYTES))
