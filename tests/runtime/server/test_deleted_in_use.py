"""What is deleted while somebody goes on from it: nobody can begin there any more; whoever has begun goes on."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest

from serai.checkpoints import Store
from serai.runtime import Session
from serai.runtime.errors import SessionGone
from serai.runtime.server.responses_request import PREFIX
from tests.runtime.server.client import Client, serving_model
from tests.runtime.server.replies import ReplyModel
from tests.runtime.server.steps import Steps

pytestmark = pytest.mark.anyio

HELLO = "well</think><response>hello</response></message>!"


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_goes_on_from_one_that_is_deleted_meanwhile(tmp_path: Path, store: bool) -> None:
    """Its first node is written once its messages have been read; until then it stands on what is to be deleted."""
    steps, model = Steps(), ReplyModel(lambda prompt: HELLO)
    async with serving_model(model, store=tmp_path, limits=steps.limits) as client:
        first = await client.post("/v1/responses", {"input": "hi"})
        model.before_step = steps
        on = {"input": "more", "previous_response_id": first["id"]}
        second = client.start("POST", "/v1/responses", {**on, "store": store})
        await steps.waits()
        assert (await client.call("DELETE", f"/v1/responses/{first['id']}")).status == 200
        steps.free()
        await second.ended.wait()
        assert second.status == 200, second.json()
        await gone(client, first["id"])
        await client.service.tidy(now_s=anyio.current_time() + 10_000)  # what was not to be stored ends
        kept = client.service.sessions.store
        assert kept is not None
        if store:
            assert kept.children(first["id"].removeprefix(PREFIX)), "its tokens are there for what was built on it"
        else:
            with pytest.raises(SessionGone):
                kept.node(first["id"].removeprefix(PREFIX))
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=tmp_path) as client:
        await gone(client, first["id"])
        on = {"input": "x", "previous_response_id": second.json()["id"]}
        assert (await client.call("POST", "/v1/responses", on)).status == (200 if store else 404)


async def gone(client: Client, name: str) -> None:
    assert (await client.call("GET", f"/v1/responses/{name}")).status == 404
    on = {"input": "x", "previous_response_id": name}
    assert (await client.call("POST", "/v1/responses", on)).status == 404


@asynccontextmanager
async def after_a_restart(folder: Path) -> AsyncIterator[tuple[Client, Steps, dict[str, Any]]]:
    """A server over a store with a response whose tokens have to be read again, each step let through by the test; and
    a request that goes on from it and is not to be stored."""
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=folder) as client:
        first = await client.post("/v1/responses", {"input": "hi"})
    with Store.open(str(folder)) as store:
        for snapshot in store.snapshots():
            store.drop_snapshot(snapshot.node_id)
    steps = Steps()
    model = ReplyModel(lambda prompt: HELLO, before_step=steps)
    async with serving_model(model, store=folder, limits=steps.limits) as client:
        yield client, steps, {"input": "more", "previous_response_id": first["id"], "store": False}


async def test_a_response_goes_on_from_one_that_is_deleted_while_its_state_is_rebuilt(tmp_path: Path) -> None:
    """And then nothing is left of the deleted one, in memory or in the store."""
    async with after_a_restart(tmp_path) as (client, steps, on):
        sessions, first = client.service.sessions, on["previous_response_id"]
        second = client.start("POST", "/v1/responses", on)
        await steps.waits()
        assert sessions.parked == 0, "it is being read for the first time"
        assert (await client.call("DELETE", f"/v1/responses/{first}")).status == 200
        steps.free()
        await second.ended.wait()
        assert second.status == 200, second.json()
        await gone(client, first)
        assert sessions.parked == 1, "the second one, which is to be forgotten later"
        await client.service.tidy(now_s=anyio.current_time() + 10_000)
        assert client.service.runtime.status().sessions == ()
        assert sessions.store is not None
        with pytest.raises(SessionGone):
            sessions.store.node(first.removeprefix(PREFIX))


async def test_a_response_that_is_deleted_before_its_resuming_began_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when the request looked for it."""
    async with after_a_restart(tmp_path) as (client, steps, on):
        looked, deleted = anyio.Event(), anyio.Event()
        runtime = client.service.runtime
        resume = runtime.resume

        async def later(*given: Any, **named: Any) -> Session:
            looked.set()
            await deleted.wait()
            return await resume(*given, **named)

        monkeypatch.setattr(runtime, "resume", later)
        steps.free()
        second = client.start("POST", "/v1/responses", on)
        with anyio.fail_after(5):
            await looked.wait()
        assert (await client.call("DELETE", f"/v1/responses/{on['previous_response_id']}")).status == 200
        deleted.set()
        await second.ended.wait()
        assert (second.status, second.json()["error"]["code"]) == (404, "previous_response_not_found")
        assert runtime.status().sessions == ()


async def test_a_response_goes_on_from_an_unstored_one_that_is_forgotten_meanwhile(tmp_path: Path) -> None:
    """Reading a long prompt may take longer than an unstored response is kept."""
    steps, model = Steps(), ReplyModel(lambda prompt: HELLO)
    async with serving_model(model, store=tmp_path, limits=steps.limits) as client:
        first = await client.post("/v1/responses", {"input": "hi", "store": False})
        model.before_step = steps
        on = {"input": "more", "previous_response_id": first["id"]}
        second = client.start("POST", "/v1/responses", on)
        await steps.waits()
        await client.service.tidy(now_s=anyio.current_time() + 10_000)
        steps.free()
        answer = await second.body()
        assert second.status == 200, answer
        assert (await client.call("POST", "/v1/responses", on)).status == 404
        await client.service.tidy()
        assert (await client.call("GET", f"/v1/responses/{answer['id']}")).status == 200
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=tmp_path) as client:
        again = await client.post("/v1/responses", {"input": "x", "previous_response_id": answer["id"]})
        assert again["status"] == "completed"


async def test_a_session_that_was_ended_meanwhile_is_a_conflict_and_no_fault_of_the_servers(tmp_path: Path) -> None:
    """A monitor paused the session that a reply is being written by."""
    steps, model = Steps(), ReplyModel(lambda prompt: HELLO)
    async with serving_model(model, store=tmp_path, limits=steps.limits) as client:
        model.before_step = steps
        asking = client.start("POST", "/v1/responses", {"input": "hi"})
        await steps.waits()
        (one,) = client.service.runtime.status().sessions
        session = client.service.runtime.find(one.id)
        assert session is not None
        session.abandon()
        steps.free()
        await asking.ended.wait()
        assert asking.status == 409, asking.json()
