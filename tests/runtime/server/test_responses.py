"""The Responses API: ids as immutable places, the sequence of events, background work, and what survives a restart."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from serai.runtime.memory.accounts import Quota
from serai.runtime.services import Policy
from tests.runtime.server.client import Client, serving_model
from tests.runtime.server.replies import ANY, ReplyModel
from tests.runtime.server.steps import Steps

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "name": "look", "description": None, "parameters": {"type": "object", "properties": {}}}
SAYS = f"hm</think><response>{ANY * 6}</response></message>!"
CALLS = 'so</think><response>I look</response><tools><call tool="look" index="1"></call></tools></message>!'


def text_of(response: dict[str, Any]) -> str:
    parts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    return "".join(parts)


async def test_an_id_used_twice_forks_and_after_a_restart_resumes(tmp_path: Path) -> None:
    """The same request on the same id gives the same bits, whatever was done between, in this process or the next."""
    ask = {"input": "and then?", "seed": 5, "temperature": 1}
    other = {"input": "something else", "seed": 5}
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        first = await client.post("/v1/responses", {"input": "hi", "seed": 1, "metadata": {"k": "v"}})
        on = {"previous_response_id": first["id"]}
        left, right = await client.post("/v1/responses", ask | on), await client.post("/v1/responses", other | on)
        again = await client.post("/v1/responses", ask | on)
        assert text_of(left) == text_of(again)
        assert text_of(left) != text_of(right)
        assert len({left["id"], right["id"], again["id"]}) == 3
        assert left["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]
        deep = await client.post("/v1/responses", ask | {"previous_response_id": left["id"]})
        got = (await client.call("GET", f"/v1/responses/{first['id']}")).json()
        assert got["next_response_ids"] == [left["id"], right["id"], again["id"]]
        assert {name: got[name] for name in first} == first
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        assert text_of(await client.post("/v1/responses", ask | on)) == text_of(left)
        assert text_of(await client.post("/v1/responses", ask | {"previous_response_id": left["id"]})) == text_of(deep)
        kept = (await client.call("GET", f"/v1/responses/{first['id']}")).json()
        assert kept["next_response_ids"][:3] == got["next_response_ids"]
        assert {name: kept[name] for name in first} == first
        items = (await client.call("GET", f"/v1/responses/{first['id']}/input_items")).json()
        assert items["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]


async def test_events_come_in_order_and_add_up_to_the_response() -> None:
    async with serving_model(ReplyModel(lambda prompt: CALLS)) as client:
        events = await client.stream(
            "/v1/responses", {"input": "hi", "tools": [TOOL], "reasoning": {"summary": "auto"}}
        )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    short = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    reasoning = [kind for kind in short[: short.index("output_item.done")] if "summary" not in kind]
    assert reasoning == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["reasoning_text.delta"] * reasoning.count("reasoning_text.delta"),
        "reasoning_text.done",
        "content_part.done",
    ]
    rest = short[short.index("output_item.done") + 1 :]
    assert rest == [
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == final["output"]
    assert [event["output_index"] for event in done] == [0, 1, 2]
    assert final["output"][0]["summary"] == [{"type": "summary_text", "text": "so"}]
    call = final["output"][2]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == json.loads(call["arguments"]) == {}
    for before, after in pairwise(done):
        assert before["sequence_number"] < after["sequence_number"]


async def test_a_tool_loop_sends_only_what_is_new() -> None:
    model = ReplyModel(lambda prompt: SAYS if 'role="tool"' in prompt else CALLS)
    async with serving_model(model) as client:
        first = await client.post("/v1/responses", {"input": "hi", "instructions": "Be brief.", "tools": [TOOL]})
        call = first["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "it is there"}
        second = await client.post(
            "/v1/responses",
            {
                "input": [result],
                "instructions": "Be brief.",
                "tools": [TOOL],
                "previous_response_id": first["id"],
            },
        )
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]
        assert model.prompts[-1].count("Be brief.") == 1
        assert model.prompts[-1].count("# Tools") == 1
        more = [TOOL, {**TOOL, "name": "find"}]
        third = {"input": "x", "instructions": "Be loud.", "tools": more, "previous_response_id": second["id"]}
        assert (await client.post("/v1/responses", third))["tools"][1]["name"] == "find"
        assert model.prompts[-1].count("Be loud.") == 1
        assert model.prompts[-1].count("New Tools Available") == 1
        for effort, status in (("low", 400), ("max", 200)):  # max is what the conversation began with
            changed = {"input": "x", "reasoning": {"effort": effort}, "previous_response_id": second["id"]}
            assert (await client.call("POST", "/v1/responses", changed)).status == status


async def test_stateless_items_are_matched_like_messages() -> None:
    model = ReplyModel(lambda prompt: SAYS if 'role="tool"' in prompt else CALLS)
    async with serving_model(model) as client:
        first = await client.post("/v1/responses", {"input": "hi", "tools": [TOOL]})
        history = [{"role": "user", "content": "hi"}, *first["output"]]
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "there"}
        second = await client.post("/v1/responses", {"input": [*history, result], "tools": [TOOL]})
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]
        counted = await client.post("/v1/responses/input_tokens", {"input": [*history, result], "tools": [TOOL]})
        assert counted["input_tokens"] == second["usage"]["input_tokens"]


async def test_what_is_not_to_be_stored_can_be_gone_on_from_for_a_while_only(tmp_path: Path) -> None:
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        first = await client.post("/v1/responses", {"input": "hi", "store": False})
        on = {"input": "more", "previous_response_id": first["id"], "store": False}
        second = await client.post("/v1/responses", on)
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"]
        sessions = client.service.sessions
        assert (await client.call("GET", f"/v1/responses/{second['id']}")).status == 200
        await client.service.tidy(now_s=anyio.current_time() + client.service.options.unstored_ttl_s)
        assert (await client.call("GET", f"/v1/responses/{second['id']}")).status == 404
        gone = await client.call("POST", "/v1/responses", on)
        assert (gone.status, gone.json()["error"]["code"]) == (404, "previous_response_not_found")
        assert sessions.store is not None
        assert sessions.store.sessions() == [], "nothing of it is on the disk any more"


async def test_a_deleted_response_stays_deleted(tmp_path: Path) -> None:
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        first = await client.post("/v1/responses", {"input": "hi"})
        second = await client.post("/v1/responses", {"input": "more", "previous_response_id": first["id"]})
        path = f"/v1/responses/{first['id']}"
        assert (await client.call("DELETE", path)).json() == {"id": first["id"], "object": "response", "deleted": True}
        assert (await client.call("GET", path)).status == 404
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        assert (await client.call("GET", path)).status == 404
        await client.post("/v1/responses", {"input": "x", "previous_response_id": second["id"]})


@pytest.mark.parametrize("id_", ["resp_" + "a" * 26, "resp_x", "nothing"])
async def test_an_unknown_id_is_a_404(id_: str) -> None:
    async with serving_model(ReplyModel(lambda prompt: SAYS)) as client:
        answer = await client.call("POST", "/v1/responses", {"input": "x", "previous_response_id": id_})
        assert (answer.status, answer.json()["error"]["code"]) == (404, "previous_response_not_found")
        assert (await client.call("GET", f"/v1/responses/{id_}")).status == 404


async def paused_reply(client: Client, steps: Steps, **more: Any) -> tuple[str, list[Any]]:
    """A background response of which three tokens are out, and its events so far."""
    body = {"input": "hi", "background": True, "stream": True, **more}
    exchange = client.start("POST", "/v1/responses", body)
    await steps.let(4)
    await exchange.wait_chunks(6)
    exchange.leave()
    await exchange.ended.wait()
    events = [json.loads(chunk.decode().split("data: ")[1]) for chunk in exchange.chunks[:6]]
    return events[0]["response"]["id"], events


async def test_background_work_outlives_its_client_and_can_be_followed_later() -> None:
    """B80: a client that leaves a background response ends nothing."""
    steps = Steps()
    async with serving_model(ReplyModel(lambda prompt: SAYS, before_step=steps), limits=steps.limits) as client:
        id_, seen = await paused_reply(client, steps)
        assert seen[0]["response"]["status"] == "queued"
        assert client.service.active == 1
        running = (await client.call("GET", f"/v1/responses/{id_}")).json()
        assert running["status"] == "in_progress"
        for wrong in ("-2", "x", "1e3", "9" * 5_000):
            refused = await client.call("GET", f"/v1/responses/{id_}?stream=true&starting_after={wrong}")
            assert refused.status == 400
            assert "starting_after must be a sequence number" in refused.json()["error"]["message"]
        follower = client.start("GET", f"/v1/responses/{id_}?stream=true&starting_after={seen[-1]['sequence_number']}")
        steps.free()
        rest = await follower.events()
        assert [one["sequence_number"] for one in seen + rest] == list(range(len(seen) + len(rest)))
        assert rest[-1]["type"] == "response.completed"
        whole = await client.call("GET", f"/v1/responses/{id_}?stream=true")
        assert (await whole.events())[-1] == rest[-1]


async def test_a_cancelled_response_is_a_place_like_any_other(tmp_path: Path) -> None:
    """B84: and what it counts is what is gone on from."""
    steps = Steps()
    model = ReplyModel(lambda prompt: SAYS, before_step=steps)
    async with serving_model(model, store=tmp_path / "s", limits=steps.limits) as client:
        id_, _ = await paused_reply(client, steps)
        cancelling = client.start("POST", f"/v1/responses/{id_}/cancel")
        steps.free()
        cancelled = await cancelling.body()
        assert cancelled["status"] == "cancelled"
        assert client.service.active == 0
        more = await client.post("/v1/responses", {"input": "go on", "previous_response_id": id_})
        assert more["status"] == "completed"
        assert cancelled["usage"]["output_tokens"] > 0
        assert more["usage"]["input_tokens_details"]["cached_tokens"] == cancelled["usage"]["total_tokens"]
        assert model.prompts[-1].count("<|end_of_msg|>") == 4, "the message that was cut is closed"


async def test_a_paused_response_waits_and_goes_on_unchanged() -> None:
    steps = Steps()
    async with serving_model(ReplyModel(lambda prompt: SAYS, before_step=steps), limits=steps.limits) as client:
        id_, _ = await paused_reply(client, steps, seed=3)
        assert (await client.call("POST", f"/v1/responses/{id_}/pause")).json()["serai:paused"]
        steps.free()
        with anyio.move_on_after(0.05):
            await client.service.wait_idle()
        assert client.service.active == 1, "it is held"
        follower = client.start("GET", f"/v1/responses/{id_}?stream=true")
        assert (await client.call("POST", f"/v1/responses/{id_}/resume")).status == 200
        final = (await follower.events())[-1]["response"]
        alone = await client.post("/v1/responses", {"input": "hi", "seed": 3})
        assert text_of(final) == text_of(alone)
        assert (await client.call("POST", f"/v1/responses/{id_}/pause")).status == 409


async def test_forks_and_tags_are_extensions(tmp_path: Path) -> None:
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        first = await client.post("/v1/responses", {"input": "hi", "seed": 1})
        forks = (await client.post(f"/v1/responses/{first['id']}/serai:fork", {"count": 2}))["data"]
        ask = {"input": "more", "seed": 9}
        said = [
            text_of(await client.post("/v1/responses", ask | {"previous_response_id": id_}))
            for id_ in (first["id"], *(fork["id"] for fork in forks))
        ]
        assert len(set(said)) == 3, "each has random numbers of its own"
        await client.post(f"/v1/responses/{first['id']}/serai:tag", {"tag": "start"})
        tags = (await client.call("GET", "/v1/serai:tags")).json()["data"]
        assert tags == [{"object": "serai:tag", "tag": "start", "response": first["id"]}]
        assert (await client.call("DELETE", "/v1/serai:tags/start")).status == 200
        assert (await client.call("GET", "/v1/serai:sessions")).json()["data"]


async def test_forks_draw_apart_that_are_made_at_once_or_after_one_was_deleted(tmp_path: Path) -> None:
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        first = await client.post("/v1/responses", {"input": "hi", "seed": 1})
        at = f"/v1/responses/{first['id']}/serai:fork"
        both = [client.start("POST", at, {}) for _ in range(2)]
        one, two = [(await each.body())["data"][0]["id"] for each in both]
        gone = (await client.post(at, {}))["data"][0]["id"]
        assert (await client.call("DELETE", f"/v1/responses/{one}")).status == 200
        (three,) = (await client.post(at, {}))["data"]
        ask = {"input": "more", "seed": 9}
        said = [
            text_of(await client.post("/v1/responses", ask | {"previous_response_id": id_}))
            for id_ in (first["id"], two, gone, three["id"])
        ]
        assert len(set(said)) == 4


@pytest.mark.parametrize("which", ["one that is there", "one that was built on"])
async def test_a_fork_made_after_a_restart_draws_apart_from_those_before(tmp_path: Path, which: str) -> None:
    ask = {"input": "more", "seed": 9}
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        first = await client.post("/v1/responses", {"input": "hi", "seed": 1})
        at = f"/v1/responses/{first['id']}/serai:fork"
        ids = [fork["id"] for fork in (await client.post(at, {"count": 3}))["data"]]
        said = text_of(await client.post("/v1/responses", ask | {"previous_response_id": ids[2]}))
        for id_ in ids[:1] if which == "one that is there" else ids:
            assert (await client.call("DELETE", f"/v1/responses/{id_}")).status == 200
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        for late in (await client.post(at, {"count": 3}))["data"]:
            assert text_of(await client.post("/v1/responses", ask | {"previous_response_id": late["id"]})) != said


@pytest.mark.parametrize("may", [1, 2])
async def test_forks_that_are_refused_leave_nothing(tmp_path: Path, may: int) -> None:
    """A fork takes two sessions of the quota while it is made. One that was refused once kept the first for ever."""
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s") as client:
        first = await client.post("/v1/responses", {"input": "hi"})
        runtime = client.service.runtime
        await client.service.tidy()
        busy = await runtime.session()
        runtime.set_quota("", Quota(sessions=may))
        at = f"/v1/responses/{first['id']}/serai:fork"
        refused = await client.call("POST", at, {"count": 3})
        assert refused.status == 429
        assert runtime._services.pool.accounts.of("").sessions == 1, "only the one that is at work"
        assert (await client.call("GET", f"/v1/responses/{first['id']}")).json()["next_response_ids"] == []
        await busy.close()
        runtime.set_quota("", None)
        assert len((await client.post(at, {"count": 3}))["data"]) == 3


async def test_what_is_not_to_be_stored_is_not_saved_in_the_background_either(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state that waits to be written is memory, and there is nothing left to write it for."""
    eager = Policy(save_after_tokens=4)
    async with serving_model(ReplyModel(lambda prompt: SAYS), store=tmp_path / "s", policy=eager) as client:
        runtime = client.service.runtime
        for number in range(3):
            made = await client.post("/v1/responses", {"input": f"{number} " + "long " * 50, "store": False})
            await client.call("DELETE", f"/v1/responses/{made['id']}")
        assert runtime.status().sessions == ()
        assert runtime._services.saver.waiting == 0
        with anyio.fail_after(10):
            await runtime.settle()
        assert runtime.status().budget.live_bytes == 0, "nor is it kept for others to start from"
        runtime.check()
    assert "was not written" not in caplog.text
