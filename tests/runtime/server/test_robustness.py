"""What clients do to servers: they leave, stall, send too much, and come in crowds; and what happens to engines."""

import gc
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from serai.runtime.models.batch import Batch
from serai.runtime.server.errors import RETRY_AFTER_S
from serai.runtime.server.event_log import EventLog
from serai.runtime.server.options import ServerOptions
from tests.runtime.server.client import OPTIONS, Client, serving_model, user
from tests.runtime.server.replies import ANY, ReplyModel, layout
from tests.runtime.server.steps import Steps

pytestmark = pytest.mark.anyio

LONG = f"</think><response>{ANY * 3000}</response></message>!"
SHORT = "</think><response>ok</response></message>!"


def asks(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [user(text)], **more}


async def idle(client: Client) -> None:
    with anyio.fail_after(10):
        await client.service.wait_idle()
        while client.service.runtime.status().budget.live_bytes:  # a step in flight keeps its buffers until it ends
            await anyio.lowlevel.checkpoint()
    assert client.service.runtime.status().sessions == ()


@pytest.mark.parametrize("events", [0, 2, 6])
async def test_a_client_that_leaves_ends_its_work_within_a_step(events: int) -> None:
    """B80: after two chunks, and before the first token."""
    steps = Steps()
    async with serving_model(ReplyModel(lambda prompt: LONG, before_step=steps), limits=steps.limits) as client:
        exchange = client.start("POST", "/v1/chat/completions", asks("hi", stream=True, max_tokens=10_000))
        if events:
            await steps.let(events)
            await exchange.wait_chunks(1)
        else:
            await steps.waits()
        taken = steps.taken
        exchange.leave()
        await exchange.ended.wait()
        steps.free()
        await idle(client)
        assert steps.taken <= taken + 1
        assert (await client.chat(user("hi"), max_tokens=3))["usage"]["completion_tokens"] == 3


async def test_a_client_that_leaves_an_answer_that_is_no_stream_ends_it_too() -> None:
    """B80"""
    steps = Steps()
    async with serving_model(ReplyModel(lambda prompt: LONG, before_step=steps), limits=steps.limits) as client:
        exchange = client.start("POST", "/v1/chat/completions", asks("hi"))
        await steps.let(3)
        exchange.leave()
        await exchange.ended.wait()
        steps.free()
        await idle(client)


async def test_of_a_response_that_nobody_stores_nor_waits_for_nothing_is_known() -> None:
    """The place of each one that was left half way once stayed in the catalogue for ever."""
    steps = Steps()
    async with serving_model(ReplyModel(lambda prompt: LONG, before_step=steps), limits=steps.limits) as client:
        exchange = client.start("POST", "/v1/responses", {"input": "hi", "store": False, "stream": True})
        await steps.let(6)
        exchange.leave()
        await exchange.ended.wait()
        steps.free()
        await idle(client)
        assert len(client.service.sessions.catalogue) == 0


async def test_who_leaves_while_waiting_is_never_read_and_holds_nobody_up() -> None:
    """B81"""
    model = ReplyModel(lambda prompt: SHORT)
    async with serving_model(model, limit_bytes=100_000) as client:
        services = client.service.runtime._services
        admission, account = services.admission, services.pool.accounts.of("")
        slot = await admission.enter(100_000, account=account, held_bytes=0, going_on=False)
        second = client.start("POST", "/v1/chat/completions", asks("two"))
        third = client.start("POST", "/v1/chat/completions", asks("three", stream=True))
        with anyio.fail_after(5):
            while admission.waiting < 2:
                await anyio.lowlevel.checkpoint()
        second.leave()
        await second.ended.wait()
        assert admission.waiting == 1
        slot.close()
        assert (await third.events())[-1]["choices"][0]["finish_reason"] == "stop"
        said = "".join(model.prompts)
        assert ">three<" in said
        assert ">two<" not in said


async def test_a_full_queue_says_when_to_come_back() -> None:
    options = ServerOptions(
        early_headers_s=30.0, shutdown_s=1.0, max_active=2, max_active_per_key=1, api_keys=("a", "b")
    )
    steps = Steps()
    model = ReplyModel(lambda prompt: SHORT, before_step=steps)
    async with serving_model(model, options, limits=steps.limits) as client:
        first = client.start("POST", "/v1/chat/completions", asks("one"), key="a")
        await steps.waits()
        greedy = await client.call("POST", "/v1/chat/completions", asks("two"), key="a")
        assert (greedy.status, greedy.headers["retry-after"]) == (429, str(RETRY_AFTER_S))
        second = client.start("POST", "/v1/chat/completions", asks("two", stream=True), key="b")
        with anyio.fail_after(5):
            while client.service.active < 2:
                await anyio.lowlevel.checkpoint()
        third = await client.call("POST", "/v1/responses", {"input": "x"}, key="b")
        assert third.json()["error"]["type"] == "rate_limit_error"
        steps.free()
        assert (await first.body())["choices"]
        assert (await second.events())[-1]["choices"]


async def test_memory_that_is_promised_away_is_a_429_also_for_a_stream() -> None:
    model = ReplyModel(lambda prompt: SHORT)
    fixed = layout(model.tokenizer.vocab_size)
    async with serving_model(model, limit_bytes=fixed.fixed_bytes * 2) as client:
        answer = await client.call("POST", "/v1/chat/completions", asks("x" * 400, stream=True))
        assert answer.status == 429
        assert "bytes" in answer.json()["error"]["message"]


async def test_logits_that_are_no_numbers_end_that_reply_and_no_other() -> None:
    """B10"""

    class Spoiled(ReplyModel):
        def _logits(self, ids: list[int]) -> Any:
            logits = super()._logits(ids)
            if self.tokenizer.decode(ids, control=True).endswith("bad"):
                logits[0] = np.nan
            return logits

    model = Spoiled(lambda prompt: "</think><response>so bad it is</response></message>!" if ">x<" in prompt else SHORT)
    async with serving_model(model) as client:
        body = asks("x", stream=True)
        spoiled, fine = (
            client.start("POST", "/v1/chat/completions", body),
            client.start("POST", "/v1/chat/completions", asks("y", stream=True)),
        )
        events = await spoiled.events()
        assert events[-1]["error"]["code"] == "logits_invalid"
        assert (await fine.events())[-1]["choices"][0]["finish_reason"] == "stop"
        failed = (await client.stream("/v1/responses", {"input": "x"}))[-1]
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "logits_invalid"
        whole = await client.call("POST", "/v1/responses", {"input": "x"})
        assert (whole.status, whole.json()["error"]["code"]) == (500, "logits_invalid")


async def test_silence_is_filled_with_comments_and_a_slow_prefill_is_not_cut_short() -> None:
    """B83"""
    options = ServerOptions(early_headers_s=0.0, keep_alive_s=0.01, shutdown_s=1.0)
    steps = Steps()
    async with serving_model(
        ReplyModel(lambda prompt: SHORT, before_step=steps), options, limits=steps.limits
    ) as client:
        exchange = client.start("POST", "/v1/chat/completions", asks("hi", stream=True))
        await steps.waits()
        await exchange.wait_chunks(4)
        assert set(exchange.chunks[:4]) == {b": keep-alive\n\n"}
        steps.free()
        assert (await exchange.events())[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_reader_that_stalls_makes_only_its_own_reply_wait() -> None:
    """B98: what is queued for it stays a few events; others keep pace; then it is let go."""
    options = ServerOptions(early_headers_s=30.0, slow_reader_s=1.0, shutdown_s=1.0)
    async with serving_model(ReplyModel(lambda prompt: LONG), options) as client:
        stalled = client.start("POST", "/v1/chat/completions", asks("hi", stream=True), stalled=True)
        other = client.start("POST", "/v1/chat/completions", asks("hi", stream=True, max_tokens=300))
        await other.ended.wait()
        decoded = client.service.sessions.counters.decoded_tokens
        assert decoded < 300 + 100, "the stalled one's reply waits"
        await stalled.ended.wait()
        assert stalled.chunks == []
        assert client.service.active == 0
        assert len(client.service.runtime.status().sessions) == 1, "the place where the other's reply ended"


async def test_the_log_of_events_is_bounded_and_says_what_it_has_let_go() -> None:
    """B98"""
    log = EventLog(max_bytes=1_000)
    for number in range(50_000):
        log.add(b"%d" % number)
    assert log.held_bytes <= 1_000
    log.end()
    with pytest.raises(Exception, match="are not kept any more"):
        await anext(log.after(10))
    assert [line async for line in log.after(49_997)] == [b"49998", b"49999"]


async def test_a_dead_engine_is_said_at_once_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    """B100"""
    steps = Steps()
    broken = threading.Event()

    def before(batch: Batch) -> None:
        steps(batch)
        if broken.is_set():
            raise RuntimeError("a kernel broke")

    async with serving_model(ReplyModel(lambda prompt: LONG, before_step=before), limits=steps.limits) as client:
        stream = client.start("POST", "/v1/chat/completions", asks("hi", stream=True))
        response = client.start("POST", "/v1/responses", {"input": "hi", "stream": True})
        await steps.let(3)
        broken.set()
        steps.free()
        with caplog.at_level(logging.ERROR):
            assert (await stream.events())[-1]["error"]["code"] == "engine_failed"
            failed = (await response.events())[-1]
            assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "engine_failed")
            new = await client.call("POST", "/v1/chat/completions", asks("x"))
            assert (new.status, new.json()["error"]["code"]) == (503, "engine_failed")
            health = await client.call("GET", "/health")
            assert health.status == 503
            assert "a kernel broke" in health.json()["reason"]
            client.service.look(0.0)
            client.service.look(1.0)
        assert caplog.text.count("RuntimeError: a kernel broke\n") == 1


async def test_health_says_when_some_experts_can_not_be_read() -> None:
    """B25: requests that don't need them are served on, so it is no 503."""
    unreadable = [""]
    async with serving_model(ReplyModel(lambda prompt: SHORT)) as client:
        runtime = client.service.runtime
        runtime.facts = replace(runtime.facts, degraded=lambda: unreadable[0])
        assert (await client.call("GET", "/health")).json()["status"] == "ok"
        unreadable[0] = "expert 3 of layer 2 can't be read"
        health = await client.call("GET", "/health")
        assert (health.status, health.json()["status"]) == (200, "degraded")
        assert health.json()["reason"] == unreadable[0]
        assert (await client.chat(user("hi"), max_tokens=3))["usage"]["completion_tokens"] == 3


async def test_an_engine_that_hangs_is_noticed() -> None:
    """B100"""
    steps = Steps()
    async with serving_model(ReplyModel(lambda prompt: LONG, before_step=steps), limits=steps.limits) as client:
        stuck = client.start("POST", "/v1/chat/completions", asks("hi"))
        await steps.waits()
        client.service.look(0.0)
        client.service.look(OPTIONS.stall_s - 1)
        assert (await client.call("GET", "/health")).status == 200
        client.service.look(OPTIONS.stall_s)
        assert (await stuck.body())["error"]["code"] == "engine_stalled"
        assert (await client.call("GET", "/health")).status == 503
        assert (await client.call("POST", "/v1/responses", {"input": "x"})).status == 503
        steps.free()
        with anyio.fail_after(5):
            while client.service.sessions.engine_waiting:
                await anyio.lowlevel.checkpoint()
        client.service.look(OPTIONS.stall_s + 1)
        assert (await client.call("GET", "/health")).status == 200


async def test_background_work_needs_nobody_to_hold_it() -> None:
    """B102"""
    async with serving_model(ReplyModel(lambda prompt: SHORT)) as client:
        made = await client.post("/v1/responses", {"input": "hi", "background": True})
        assert made["status"] == "queued"
        for _ in range(10):
            gc.collect()
            await anyio.lowlevel.checkpoint()
        await client.service.wait_idle()
        assert (await client.call("GET", f"/v1/responses/{made['id']}")).json()["status"] == "completed"


async def test_background_work_that_raises_is_logged_and_its_response_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B102: nobody awaits it, so nobody but the log and the response can tell."""

    async def broken(*_: object) -> None:
        gc.collect()
        raise RuntimeError("what nobody foresaw")

    async with serving_model(ReplyModel(lambda prompt: SHORT)) as client:
        monkeypatch.setattr(client.service.runs, "_tell_piece", broken)
        made = await client.post("/v1/responses", {"input": "hi", "background": True})
        assert made["status"] == "queued"
        with anyio.fail_after(10):
            await client.service.wait_idle()
        seen = await client.call("GET", f"/v1/responses/{made['id']}")
        assert (seen.json()["status"], seen.json()["error"]["code"]) == ("failed", "internal_error")
        assert b"foresaw" not in b"".join(seen.chunks), "the inside of a server is not for its clients"
        assert [str(one.exc_info[1]) for one in caplog.records if one.exc_info] == ["what nobody foresaw"]
        monkeypatch.undo()
        assert client.service.runtime.status().sessions == ()
        assert (await client.chat(user("hi")))["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_the_engine_can_be_paused(mode: str) -> None:
    steps = Steps()
    async with serving_model(ReplyModel(lambda prompt: SHORT, before_step=steps), limits=steps.limits) as client:
        exchange = client.start("POST", "/v1/chat/completions", asks("hi"))
        await steps.let(3)
        pausing = client.start("POST", f"/pause?mode={mode}")
        if mode == "keep":
            await pausing.ended.wait()
        steps.free()
        await pausing.ended.wait()
        assert (await client.call("GET", "/is_paused")).json() == {"is_paused": True}
        if mode == "keep":
            assert not exchange.ended.is_set()
        else:
            assert exchange.ended.is_set()
            assert (exchange.status, mode) in ((200, "wait"), (503, "abort"))
        assert (await client.call("POST", "/resume")).status == 200
        if mode == "keep":
            assert (await exchange.body())["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_the_engine_can_be_paused_however_busy_the_server_is(mode: str) -> None:
    """It once waited for a moment without a request, which may never come: here another has come before the first has
    ended."""
    steps = Steps()
    model = ReplyModel(lambda prompt: LONG if ">two<" in prompt else SHORT, before_step=steps)
    async with serving_model(model, limits=steps.limits) as client:
        first = client.start("POST", "/v1/chat/completions", asks("one"))
        await steps.waits()
        pausing = client.start("POST", f"/pause?mode={mode}")
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        second = client.start("POST", "/v1/chat/completions", asks("two", max_tokens=300))
        with anyio.fail_after(20):
            while not first.ended.is_set():
                with anyio.move_on_after(0.1):  # once it is paused no step comes
                    await steps.let(1)
            await pausing.ended.wait()
            assert not second.ended.is_set()
            assert (await client.call("GET", "/is_paused")).json() == {"is_paused": True}
            assert (await client.call("POST", "/resume")).status == 200
            steps.free()
            assert (await second.body())["usage"]["completion_tokens"] == 300
        assert (first.status, mode) in ((200, "wait"), (503, "abort"))


async def test_shutting_down_ends_replies_in_order_and_keeps_what_was_said(tmp_path: Path) -> None:
    options = ServerOptions(early_headers_s=30.0, shutdown_s=0.05)
    async with serving_model(ReplyModel(lambda prompt: LONG), options, store=tmp_path / "s") as client:
        exchange = client.start("POST", "/v1/responses", {"input": "hi", "stream": True})
        await exchange.wait_chunks(10)
        await client.service.close()
        assert (await client.call("POST", "/v1/chat/completions", asks("x"))).status == 503
        last = (await exchange.events())[-1]
        assert last["type"] == "response.incomplete"
        id_ = last["response"]["id"]
    async with serving_model(ReplyModel(lambda prompt: SHORT), store=tmp_path / "s") as client:
        assert (await client.post("/v1/responses", {"input": "x", "previous_response_id": id_}))[
            "status"
        ] == "completed"


async def test_bodies_are_bounded_and_must_be_json() -> None:
    options = ServerOptions(max_request_bytes=1_000, shutdown_s=1.0)
    async with serving_model(ReplyModel(lambda prompt: SHORT), options) as client:
        assert (await client.call("POST", "/v1/chat/completions", asks("x" * 1_000))).status == 413
        for body in (b"", b"[1]", b"{", b'{"messages": NaN}', b'{"messages": 1e999}', b"\xff", b"[" * 900):
            assert (await client.call("POST", "/v1/chat/completions", body)).status == 400
        assert (await client.call("GET", "/v1/nothing")).json()["error"]["code"] == "unknown_url"
