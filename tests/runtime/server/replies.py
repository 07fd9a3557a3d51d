"""A model whose replies are written by a test: a function from the prompt's text to a K3 script.

It reads the token ids back from the latent pages, so a state that was forked, stored, restored or replayed wrongly
shows in what it says. Everything around it is the real thing.
"""

import ctypes
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import Fingerprint, LatentType, StateLayout
from serai.checkpoints.store import Store
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR
from serai.runtime.engine import Engine
from serai.runtime.engine_thread import EngineThread
from serai.runtime.figures import ModelFacts
from serai.runtime.models.batch import Batch, Outputs
from serai.runtime.models.config import parse_config
from serai.runtime.runtime import Runtime, running
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy, assemble
from serai.runtime.sessions.journal import Journal
from serai.runtime.state import StatePool
from serai.runtime.text.tokenizer import Tokenizer
from tests.runtime.chat.scripts import script, tags
from tests.runtime.chat.tokenizers_for_tests import byte_tokenizer

K3, K2 = "kimi_k3", "kimi_linear"
PAGE_TOKENS = 64
CERTAIN = 60.0
"""A logit so far above the others that nothing else is ever drawn."""

Script = Callable[[str], str]
"""The prompt as text, control tokens by name, to the reply in the shorthand of `tags` (K3) or as it is (K2)."""

ANY = "\0"
"""In a reply: any of the letters, each as likely."""


@cache
def layout(vocab: int) -> StateLayout:
    return StateLayout(
        kda_shape=(1, 1, 2, 2),
        conv_shape=(1, 3, 3, 2),
        mla_layers=1,
        latent_width=1,
        latent_type=LatentType.FLOAT32,
        page_tokens=PAGE_TOKENS,
        vocab=vocab,
    )


class ReplyModel:
    """`before_step(batch)` is a hook: to block, to count, to raise."""

    def __init__(self, reply: Script, *, family: str = K3, before_step: Callable[[Batch], None] | None = None) -> None:
        self.family = family
        self.tokenizer: Tokenizer = byte_tokenizer(family)
        self.before_step = before_step
        self.reply = reply
        self.prompts: list[str] = []
        self._replies: dict[tuple[int, ...], list[int]] = {}
        self._marks: tuple[int, ...] = ()
        self._opening = self.tokenizer.token_id("<|open|>" if family == K3 else "<|im_middle|>")

    def forward(self, batch: Batch) -> Generator[None, None, Outputs]:
        if self.before_step is not None:
            self.before_step(batch)
        yield
        layout_ = layout(self.tokenizer.vocab_size)
        fixed = sum(int(np.prod(shape)) for shape in (layout_.kda_shape, layout_.conv_shape))
        wanted = set(batch.logit_rows.tolist())
        logits = []
        for segment in range(len(batch.seg_pos)):
            start, end = int(batch.seg_start[segment]), int(batch.seg_start[segment + 1])
            first = int(batch.seg_pos[segment])
            pages = batch.page_addr[batch.page_start[segment] : batch.page_start[segment + 1]].tolist()
            _floats(int(batch.state_out[segment]), fixed)[:] = first + end - start
            for row, token in enumerate(batch.tokens[start:end].tolist(), first):
                _floats(pages[row // PAGE_TOKENS], PAGE_TOKENS)[row % PAGE_TOKENS] = token
            ids = _read(pages, first + end - start) if wanted & set(range(start, end)) else []
            logits += [self._logits(ids[: first + row - start + 1]) for row in range(start, end) if row in wanted]
        return Outputs(np.array(logits, np.float32).reshape(len(logits), self.tokenizer.vocab_size))

    def _logits(self, ids: list[int]) -> NDArray[np.float32]:
        logits = np.zeros(self.tokenizer.vocab_size, np.float32)
        begins = self._reply_begins(ids)
        if begins is None:
            return logits
        key = tuple(ids[:begins])
        if key not in self._replies:
            prompt = self.tokenizer.decode(key, control=True)
            self.prompts.append(prompt)
            said = self.reply(prompt)
            self._replies[key] = _ids(tags(said) if self.family == K3 else script(said), self.tokenizer)
        reply = self._replies[key]
        at = len(ids) - begins
        if at >= len(reply):
            logits[self.tokenizer.token_id("[EOS]")] = CERTAIN
        elif reply[at] == 0:
            logits[ord("a") : ord("z") + 1] = CERTAIN
        else:
            logits[reply[at]] = CERTAIN
        return logits

    def _reply_begins(self, ids: list[int]) -> int | None:
        """Where the last generation prompt ends: the assistant's message and the channel after it."""
        mark = self._marks = self._marks or self._mark()
        for end in range(len(ids), len(mark) - 1, -1):
            if ids[end - 1] == mark[-1] and ids[end - len(mark) : end] == list(mark):
                return end + (self._channel(ids, end) if self.family == K3 else 0)
        return None

    def _mark(self) -> tuple[int, ...]:
        if self.family == K3:
            return tuple(_ids(tags('<message role="assistant">'), self.tokenizer))
        return tuple(_ids(script("<|im_assistant|>assistant<|im_middle|>"), self.tokenizer))

    def _channel(self, ids: list[int], end: int) -> int:
        sep = self.tokenizer.token_id("<|sep|>")
        rest = ids[end:]
        return rest.index(sep) + 1 if sep in rest else len(rest)


def _ids(segments: tuple[object, ...], tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = []
    for segment in segments:
        text, markup = getattr(segment, "text"), getattr(segment, "markup")  # noqa: B009
        ids += [tokenizer.token_id(text)] if markup else tokenizer.encode(text)
    return ids


def _read(pages: list[int], position: int) -> list[int]:
    ids: list[int] = []
    for number, page in enumerate(pages):
        rows = min(PAGE_TOKENS, position - number * PAGE_TOKENS)
        ids += _floats(page, PAGE_TOKENS)[:rows].astype(np.int64).tolist()
    return ids


def _floats(address: int, count: int) -> NDArray[np.float32]:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


NOTHING_KEPT = Policy(reuse=False, guess=False)
"""Only live sessions hold memory, and a step reads one token of each: what a test counts is what it asked for."""


@asynccontextmanager
async def reply_runtime(
    model: ReplyModel,
    *,
    store: Path | None = None,
    limits: Limits | None = None,
    limit_bytes: int | None = None,
    policy: Policy = NOTHING_KEPT,
    max_positions: int = 100_000,
) -> AsyncIterator[Runtime]:
    """A runtime over such a model, checked to leave nothing behind when the block ends."""
    kept = None if store is None else await anyio.to_thread.run_sync(Store.open, str(store))
    thread = EngineThread()
    shape = layout(model.tokenizer.vocab_size)
    pool = StatePool(shape, limit_bytes=limit_bytes, poison=True)
    names = ("config", "tokenizer", "chat_format", "precision", "trunk", "weights", "build", "simd")
    fingerprint = Fingerprint(
        **dict.fromkeys(names, "scripted"),
        latents="float32",
        experts_per_token=0,
        state_layout=shape.describe(),
    )
    services = assemble(
        engine=Engine(model, shape),
        thread=thread,
        pool=pool,
        limits=limits,
        policy=policy,
        journal=Journal(kept, fingerprint, shape),
        tokenizer=model.tokenizer,
        vocab_size=shape.vocab,
        max_positions=max_positions,
        stop_ids=frozenset(),
    )
    tiny = TINY_K3 if model.family == K3 else TINY_LINEAR
    facts = ModelFacts("scripted", "exact", parse_config(tiny.config()), 0, 0, 0, limit_bytes or 0)
    try:
        async with running(Runtime(services, facts)) as runtime:
            yield runtime
        assert pool.live_bytes == 0, "every buffer came back"
    finally:
        thread.close()
        if kept is not None:
            kept.close()
