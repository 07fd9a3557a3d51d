"""B99: while a prompt of 1 MB is read, rendered, tokenised and computed, everybody else is served as before."""

from typing import Any

import anyio
import pytest

from serai.runtime.models.batch import Batch
from serai.runtime.scheduler import Limits
from tests.runtime.server.client import Client, Exchange, serving_model, user
from tests.runtime.server.replies import ANY, ReplyModel

pytestmark = pytest.mark.anyio

LARGE = {"messages": [user("word " * 200_000)]}
SHORT = "</think><response>ok</response></message>!"
ENDLESS = f"</think><response>{ANY * 200_000}</response></message>!"
LIMITS = Limits(step_rows=8_192, prefill_rows_beside_decode=8_192)
LATEST_S = 0.3
"""Generous: the machine that runs this may be shared."""


async def polled(client: Client, until: Exchange) -> int:
    """Ask for health until that one has ended, each answer in time; how often that was."""
    asked = 0
    while not until.ended.is_set():
        began_s = anyio.current_time()
        assert (await client.call("GET", "/health")).status == 200
        assert anyio.current_time() - began_s < LATEST_S
        asked += 1
        await anyio.sleep(0.002)
    return asked


async def test_a_large_prompt_that_is_refused_leaves_the_loop_free() -> None:
    """It is known to be too long once it is tokenised."""
    async with serving_model(ReplyModel(lambda prompt: SHORT), max_positions=1_000) as client:
        large = client.start("POST", "/v1/chat/completions", LARGE)
        assert await polled(client, large) > 3
        assert (large.status, large.json()["error"]["code"]) == (400, "context_length_exceeded")


class Gaps:
    """A hook before each step: what the stream that is decoded beside the prompt gets of them."""

    def __init__(self) -> None:
        self.alone = 0  # steps with a row of the stream alone
        self.together = 0  # with its row, and some of the prompt
        self.longest = 0  # steps one after the other with rows of the prompt and none of the stream
        self._without = 0

    def __call__(self, batch: Batch) -> None:
        lengths = [int(end - start) for start, end in zip(batch.seg_start, batch.seg_start[1:], strict=False)]
        reads, decodes = max(lengths) > 1, min(lengths) == 1
        self.alone += decodes and not reads
        self.together += decodes and reads
        self._without = 0 if decodes else self._without + 1
        self.longest = max(self.longest, self._without)


async def test_another_stream_goes_on_while_a_large_prompt_is_read() -> None:
    gaps = Gaps()
    model = ReplyModel(lambda prompt: SHORT if "word word" in prompt else ENDLESS)
    async with serving_model(model, limits=LIMITS, max_positions=2_000_000) as client:
        asking: dict[str, Any] = {"messages": [user("hi")], "stream": True}
        stream = client.start("POST", "/v1/chat/completions", asking)
        await stream.wait_chunks(3)
        model.before_step = gaps
        large = client.start("POST", "/v1/chat/completions", LARGE)
        asked = await polled(client, large)
        model.before_step = None
        assert large.json()["choices"][0]["message"]["content"] == "ok"
        assert not stream.ended.is_set()
        stream.leave()
        assert asked > 20
        assert gaps.alone > 20, "while it was tokenised"
        assert gaps.together > 100, "while it was computed"
        assert gaps.longest <= 1, "once perhaps, while its reader is on the way back to ask for the next token"
        assert client.service.runtime.status().work.loop_delay_p99_s < LATEST_S
