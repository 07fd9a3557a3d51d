"""The compiled inner loops of training (native.cpp) as differentiable functions; plain torch stands in without g++."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WIDTH = 32
"""Head width the recurrence is compiled for."""
TAPS = 4
_SOURCE = Path(__file__).with_name("native.cpp")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The kernel for heads of width WIDTH, compiled once a source version; None without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"nano-{WIDTH}-{digest}.so"
    if not built.exists():
        partial = built.with_suffix(".partial")
        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-mprefer-vector-width=512", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, f"-DD={WIDTH}", str(_SOURCE), "-o", str(partial)], check=True)
        partial.replace(built)
    return ctypes.CDLL(str(built))


def enabled() -> bool:
    """Whether the model uses these functions: g++ exists and NANO_NATIVE is not 0 (plain torch, to compare)."""
    return os.environ.get("NANO_NATIVE") != "0" and library() is not None


def _pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        kernel = library()
        assert kernel is not None
        batch, time, heads, _ = q.shape
        inputs = [x.float().contiguous() for x in (q, k, v, g.exp(), beta)]
        o = torch.empty_like(inputs[0])
        kept = torch.empty(batch * heads, -(-time // 16), WIDTH, WIDTH)
        kernel.kda_forward(*_pointers(*inputs, o, kept), *map(ctypes.c_int64, (batch, time, heads)))
        ctx.save_for_backward(*inputs, kept)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        *inputs, kept = ctx.saved_tensors
        kernel = library()
        assert kernel is not None
        d_o = grads[0].float().contiguous()
        outputs = [torch.empty_like(x) for x in inputs]
        batch, time, heads, _ = d_o.shape
        kernel.kda_backward(*_pointers(*inputs, kept, d_o, *outputs), *map(ctypes.c_int64, (batch, time, heads)))
        return tuple(outputs)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`kda.step_by_step` from a zero state, outputs only: q, k, v, g [B, T, H, 32], beta [B, T, H] -> [B, T, H, 32]."""
    result: Tensor = _Native.apply(q, k, v, g, beta)
    return result


class _Prepare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel_weight: Tensor, heads: int, eps: float) -> Tensor:
        kernel = library()
        assert kernel is not None
        batch, time, _ = x.shape
        x, taps = x.float().contiguous(), kernel_weight.t().contiguous()
        out = torch.empty(3, batch, time, heads, WIDTH)
        sizes = [*map(ctypes.c_int64, (batch, time, heads)), ctypes.c_float(eps)]
        kernel.prepare_forward(*_pointers(x, taps, out), *sizes)
        ctx.save_for_backward(x, taps)
        ctx.heads, ctx.eps = heads, eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, taps = ctx.saved_tensors
        kernel = library()
        assert kernel is not None
        batch, time, _ = x.shape
        d_out = grads[0].float().contiguous()
        d_x, d_taps = torch.empty_like(x), torch.empty(batch, *taps.shape)
        sizes = [*map(ctypes.c_int64, (batch, time, ctx.heads)), ctypes.c_float(ctx.eps)]
        kernel.prepare_backward(*_pointers(x, taps, d_out, d_x, d_taps), *sizes)
        return d_x, d_taps.sum(0).t(), None, None


def prepare(x: Tensor, kernel_weight: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, T, H, 32] from their joint projection x [B, T, 3 H 32]: convolution ([3 H 32, 4]), SiLU, L2 norms."""
    q, k, v = _Prepare.apply(x, kernel_weight, heads, eps).unbind(0)
    return q, k, v


class _Rms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernel = library()
        assert kernel is not None
        x = x.float().contiguous()
        width = x.shape[-1]
        y, inverse = torch.empty_like(x), torch.empty(x.numel() // width)
        sizes = [ctypes.c_int64(inverse.numel()), ctypes.c_int64(width)]
        kernel.rms_forward(*_pointers(x, weight, y, inverse), *sizes, ctypes.c_float(eps))
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        kernel = library()
        assert kernel is not None
        d_y = grads[0].float().contiguous()
        d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
        sizes = [ctypes.c_int64(inverse.numel()), ctypes.c_int64(weight.numel())]
        kernel.rms_backward(*_pointers(x, weight, inverse, d_y, d_x, d_weight), *sizes)
        return d_x, d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis."""
    y: Tensor = _Rms.apply(x, weight, eps)
    return y


def _table(tensors: list[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, eps: float, *values: Tensor) -> Tensor:
        kernel = library()
        assert kernel is not None
        values = tuple(v.float().contiguous() for v in values)
        width, n = w.numel(), len(values)
        rows = values[0].numel() // width
        out = torch.empty_like(values[0])
        p, raw, inverse = (torch.empty(rows, n) for _ in range(3))
        sizes = [*map(ctypes.c_int64, (n, rows, width)), ctypes.c_float(eps)]
        kernel.mix_forward(_table(list(values)), *_pointers(w, out, p, raw, inverse), *sizes)
        ctx.save_for_backward(w, p, raw, inverse, *values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        w, p, raw, inverse, *values = ctx.saved_tensors
        kernel = library()
        assert kernel is not None
        d_out = grads[0].float().contiguous()
        d_values, d_w = [torch.empty_like(v) for v in values], torch.zeros_like(w)
        sizes = map(ctypes.c_int64, (len(values), p.shape[0], w.numel()))
        arrays = _pointers(w, p, raw, inverse, d_out)
        kernel.mix_backward(_table(values), *arrays, _table(d_values), *_pointers(d_w), *sizes)
        return (d_w, None, *d_values)


def residual_mix(w: Tensor, eps: float, values: list[Tensor]) -> Tensor:
    """Attention residual: the values [..., width] weighted by the softmax of (v . w) / rms(v)."""
    mixed: Tensor = _Mix.apply(w, eps, *values)
    return mixed


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: float, linear_beta: float) -> Tensor:
        kernel = library()
        assert kernel is not None
        ctx.kind = x.dtype
        x = x.float().contiguous()
        y = torch.empty(*x.shape[:-1], x.shape[-1] // 2)
        ctx.numbers = [ctypes.c_int64(x.numel() // x.shape[-1]), ctypes.c_int64(y.shape[-1])]
        ctx.numbers += [ctypes.c_float(beta), ctypes.c_float(linear_beta)]
        kernel.situ_forward(*_pointers(x, y), *ctx.numbers)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        kernel = library()
        assert kernel is not None
        d_x = torch.empty_like(x)
        kernel.situ_backward(*_pointers(x, grads[0].float().contiguous(), d_x), *ctx.numbers)
        return d_x.to(ctx.kind), None, None


def situ(gate_and_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of the two halves of the last axis."""
    y: Tensor = _Situ.apply(gate_and_up, beta, linear_beta)
    return y
