"""llama.cpp through llama-cpp-python, as a peer to measure beside: tokens in, logits out, sequences by number."""

import ctypes
import functools
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels.cpu import features
from serai.runtime.bench.report import BenchFailed

PINNED = "0.3.36"
"""The release that knows this architecture; how it is built is in the README's extra `bench`."""


_GGML_TYPE_F32 = 0
_FLASH_ATTENTION_OFF = 0


def why_not() -> str | None:
    """Why llama.cpp can't be run beside; None if it can."""
    for name in ("gguf", "llama_cpp"):
        if find_spec(name) is None:
            return f"{name} is not installed: pip install 'serai[bench]' builds it, in minutes"
    import llama_cpp

    if llama_cpp.__version__ != PINNED:
        return f"llama-cpp-python is {llama_cpp.__version__}, and {PINNED} is the release this was written against"
    return None


def crashes_with_amx() -> bool:
    """Whether llama.cpp would lay weights out for AMX: release 0.3.36 then ends the process in its first product.

    There it is run without such layouts. The switch for them, `use_extra_bufts`, is also that of the layouts repacked
    for the CPU's vector units, so it has neither.
    """
    return bool(features().get("amx-int8"))


def system_info() -> str:
    """llama.cpp's own words on what it was built with and this CPU has, also where a layout of it is switched off."""
    import llama_cpp

    said: bytes = llama_cpp.llama_print_system_info()
    return said.decode().strip(" |")


@functools.cache
def _begin() -> Any:
    """Once a process: llama.cpp ready and silent. Gives what it calls to log, which must live as long as it may."""
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return silent


class Llama:
    """A GGUF file opened by llama.cpp with a context for `sequences` sequences of `tokens` tokens each.

    `in_float32` keeps latents in float32 and leaves out flash attention, as a comparison of functions wants it; else
    both are as llama.cpp has them by default. Raises `BenchFailed` when llama.cpp opens no such file or makes no such
    context; nothing stays open then.
    """

    def __init__(
        self, path: Path, *, threads: int, sequences: int, tokens: int, batch: int, in_float32: bool = False
    ) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        _begin()
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = not crashes_with_amx()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * tokens, batch, batch
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max = sequences
        if in_float32:
            params.type_k = params.type_v = _GGML_TYPE_F32
            params.flash_attn_type = _FLASH_ATTENTION_OFF
        if hasattr(params, "n_outputs_max"):
            params.n_outputs_max = sequences
        with ExitStack() as opened:
            model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
            if not model:
                raise BenchFailed(f"llama.cpp does not open {path}")
            opened.callback(llama_cpp.llama_model_free, model)
            self._context = llama_cpp.llama_init_from_model(model, params)
            if not self._context:
                raise BenchFailed(f"llama.cpp makes no context for {sequences} sequences of {tokens} tokens")
            opened.callback(llama_cpp.llama_free, self._context)
            self._batch = llama_cpp.llama_batch_init(batch, 0, 1)
            opened.callback(llama_cpp.llama_batch_free, self._batch)
            self._memory = llama_cpp.llama_get_memory(self._context)
            self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
            self._opened = opened.pop_all()
        self._positions = [0] * sequences

    def feed(self, parts: Sequence[tuple[int, NDArray[np.int32]]]) -> NDArray[np.float32]:
        """Feed each (sequence, tokens) after what that sequence holds: next-token logits `[len(parts), vocab]`."""
        at = 0
        for sequence, tokens in parts:
            for offset, token in enumerate(tokens):
                self._batch.token[at] = int(token)
                self._batch.pos[at] = self._positions[sequence] + offset
                self._batch.n_seq_id[at] = 1
                self._batch.seq_id[at][0] = sequence
                self._batch.logits[at] = offset == len(tokens) - 1
                at += 1
            self._positions[sequence] += len(tokens)
        self._batch.n_tokens = at
        if code := self._lib.llama_decode(self._context, self._batch):
            raise BenchFailed(f"llama.cpp gave {code} for a batch of {at} tokens")
        logits = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (len(parts), self._vocab)).copy()

    def forget(self, sequence: int) -> None:
        """Drop all that a sequence holds."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._positions[sequence] = 0

    def close(self) -> None:
        self._opened.close()
