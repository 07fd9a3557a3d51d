"""Scenarios from the field over HTTP: ids that name nothing, ids that can't, and what a restart costs."""

import errno
import gc
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from serai.checkpoints.store import Store
from serai.runtime.services import Policy
from tests.runtime.server.client import OPTIONS, Client, serving_model, user
from tests.runtime.server.replies import ReplyModel
from tests.runtime.server.steps import Steps

pytestmark = pytest.mark.anyio

HELLO = "well</think><response>hello</response></message>!"
ODD = ("..", ".", "...", "a\\b", "a\0b", "resp_" + "a" * 300, "resp_x ", "resp_x.", "resp_\u00c5", "resp_A\u030a")


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file with its size and when it was written."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def calls_on(name: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Every request that names a response."""
    at = f"/v1/responses/{name}"
    return [
        ("POST", "/v1/responses", {"input": "hi", "previous_response_id": name}),
        ("POST", "/v1/responses/input_tokens", {"input": "hi", "previous_response_id": name}),
        ("GET", at, None),
        ("GET", f"{at}?stream=true", None),
        ("GET", f"{at}/input_items", None),
        ("DELETE", at, None),
        *(("POST", f"{at}/{action}", None) for action in ("cancel", "pause", "resume")),
        ("POST", f"{at}/serai:fork", {}),
        ("POST", f"{at}/serai:tag", {"tag": "t"}),
    ]


async def refused(client: Client, folder: Path, name: str, statuses: set[int]) -> None:
    before, steps = files(folder), client.service.runtime.counters.steps
    for method, path, body in calls_on(name):
        exchange = await client.call(method, path, body)
        assert exchange.status in statuses, (method, path, exchange.json())
        assert exchange.json()["error"]["message"]
    assert client.service.runtime.status().sessions == ()
    assert client.service.runtime.counters.steps == steps
    assert files(folder) == before


async def test_an_id_that_is_not_known_is_a_404_and_makes_nothing(tmp_path: Path) -> None:
    """B45, B54: neither a session nor a file, by whatever request."""
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=tmp_path) as client:
        for name in ("nope", "resp_nope", "resp_" + "a" * 26, "a" * 26):
            await refused(client, tmp_path, name, {404})


async def test_what_is_no_id_is_a_400_and_touches_no_file(tmp_path: Path) -> None:
    """B72: dots, slashes, control characters, blanks at the end, other letters, and names without an end."""
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=tmp_path) as client:
        for name in ODD:
            await refused(client, tmp_path, name, {400})
        for name in ("", "a/b", "../../etc/passwd"):
            body = {"input": "hi", "previous_response_id": name}
            assert (await client.call("POST", "/v1/responses", body)).status == 400


async def test_a_name_for_a_response_is_kept_as_it_is_or_refused(tmp_path: Path) -> None:
    """B72: tags are kept under a hash of what they are, so that no two of them meet and none is a path."""
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=tmp_path) as client:
        made = await client.post("/v1/responses", {"input": "hi"})
        at = f"/v1/responses/{made['id']}/serai:tag"
        kept = []
        for name in ("..", "...", "a/b", "a\\b", "dot.", "\u00c5", "A\u030a", "Case", "case", "../../etc/passwd"):
            assert (await client.call("POST", at, {"tag": name})).status == 200
            kept.append(name)
        before = files(tmp_path)
        for wrong in ("", "a\0b", "x" * 300, "trailing ", "a\nb", 7, None):
            exchange = await client.call("POST", at, {"tag": wrong})
            assert exchange.status == 400, wrong
        assert files(tmp_path) == before
        listed = (await client.call("GET", "/v1/serai:tags")).json()["data"]
        assert sorted(one["tag"] for one in listed) == sorted(kept)
        assert {len(file.name) for file in (tmp_path / "tags").iterdir()} == {64}


async def test_ids_that_the_server_made_always_pass(tmp_path: Path) -> None:
    """B72"""
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=tmp_path) as client:
        for _ in range(20):
            made = await client.post("/v1/responses", {"input": "hi", "max_output_tokens": 1})
            assert (await client.call("GET", f"/v1/responses/{made['id']}")).status == 200


@pytest.mark.parametrize("save_after_tokens", [0, 256], ids=["every-state", "as-usual"])
async def test_after_a_restart_only_what_is_new_is_read_and_the_answer_says_so(
    tmp_path: Path, save_after_tokens: int
) -> None:
    """B40: a conversation of 500 tokens; the engine's own counter and the reply agree. Where states lie some tokens
    apart, those since the last one are read again, and not told as known."""
    policy = Policy(save_after_tokens=save_after_tokens)

    def serving(model: ReplyModel) -> AbstractAsyncContextManager[Client]:
        return serving_model(model, store=tmp_path, policy=policy)

    def check(usage: dict[str, Any], known: int, client: Client) -> None:
        prompt = usage.get("input_tokens", usage.get("prompt_tokens", 0))
        cached = (usage.get("input_tokens_details") or usage["prompt_tokens_details"])["cached_tokens"]
        assert known - min(save_after_tokens, 60) <= cached <= known
        assert client.service.runtime.counters.prefilled_tokens == prompt - cached

    async with serving(ReplyModel(lambda prompt: HELLO)) as client:
        first = await client.post("/v1/responses", {"input": "x" * 500})
        assert first["usage"]["total_tokens"] >= 500
    async with serving(ReplyModel(lambda prompt: HELLO)) as client:
        second = await client.post("/v1/responses", {"input": "five!", "previous_response_id": first["id"]})
        check(second["usage"], first["usage"]["total_tokens"], client)
        chat = await client.chat(user("y" * 500))
    async with serving(ReplyModel(lambda prompt: HELLO)) as client:
        answer = {"role": "assistant", "content": "hello"}
        again = await client.chat(user("y" * 500), answer, user("five!"))
        check(again["usage"], chat["usage"]["total_tokens"], client)


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "9" * 5000, "\u0663"])
async def test_a_limit_is_a_small_number(limit: str) -> None:
    """One of five thousand digits once was an error of the server's."""
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        made = await client.post("/v1/responses", {"input": "hi"})
        exchange = await client.call("GET", f"/v1/responses/{made['id']}/input_items?limit={limit}")
        assert (exchange.status, exchange.json()["error"]["param"]) == (400, "limit")


async def test_shutting_down_waits_for_background_work(tmp_path: Path) -> None:
    """B102: nobody holds on to it, and it is whole in the store when the server has ended."""
    steps, options = Steps(), replace(OPTIONS, shutdown_s=30.0)
    model = ReplyModel(lambda prompt: HELLO, before_step=steps)
    async with serving_model(model, options, store=tmp_path, limits=steps.limits) as client:
        made = await client.post("/v1/responses", {"input": "hi", "background": True})
        await steps.waits()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.service.close)
            gc.collect()
            with anyio.move_on_after(0.05):
                await client.service.wait_idle()
            assert client.service.active == 1
            assert (await client.call("POST", "/v1/responses", {"input": "x"})).status == 503
            steps.free()
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=tmp_path) as client:
        assert (await client.call("GET", f"/v1/responses/{made['id']}")).json()["status"] == "completed"


async def test_a_state_that_could_not_be_stored_is_seen_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B55: not only in a line of the log; and in the status that monitors read."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Store, "_commit", full)
    policy = Policy(save_after_tokens=0)
    async with serving_model(ReplyModel(lambda prompt: HELLO), store=tmp_path, policy=policy) as client:
        assert (await client.chat(user("hi")))["choices"][0]["message"]["content"] == "hello"
        await client.service.runtime.settle()
        exchange = await client.call("GET", "/metrics")
        lines = b"".join(exchange.chunks).decode().splitlines()
        told = {name: float(value) for name, value in (line.split() for line in lines if line[:1] != "#")}
        assert told["serai_failed_saves_total"] > 0
        assert told["serai_saves_total"] == 0
        work = (await client.call("GET", "/serai/status")).json()["work"]
        assert work["failed_saves"] == told["serai_failed_saves_total"]
        monkeypatch.undo()
