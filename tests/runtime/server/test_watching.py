"""The monitor's own source, over the server's routes."""

import json
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import pytest

from serai.runtime.monitor.http_source import HttpSource
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused, SourceUnreachable
from serai.runtime.monitor.transcript import Voice
from serai.runtime.server.options import ServerOptions
from tests.runtime.server.client import serving_model, user
from tests.runtime.server.replies import ReplyModel

pytestmark = pytest.mark.anyio


async def test_a_monitor_reads_the_status_and_acts(tmp_path: Path) -> None:
    model = ReplyModel(lambda prompt: "</think><response>ok</response></message>!")
    async with serving_model(model, store=tmp_path / "s") as client:
        made = await client.post("/v1/responses", {"input": "hi"})
        transport = httpx.ASGITransport(client.app)
        async with HttpSource("http://server", transport=transport) as source:
            (session,) = (await source.status()).sessions
            assert (await source.about()).comparison
            forked = await source.act(Action(ActionKind.FORK, session.id, "twin"))
            assert {one.label for one in (await source.status()).sessions} == {"", "twin"}
            assert forked.session_id is not None
            await source.act(Action(ActionKind.PAUSE, forked.session_id))
            assert (await source.export(session.id, tmp_path / "bundle")).message.startswith(
                f"{(tmp_path / 'bundle').stat().st_size:,} bytes"
            )
            await source.act(Action(ActionKind.PAUSE, session.id))
            on = {"input": "more", "previous_response_id": made["id"]}
            assert (await client.post("/v1/responses", on))["status"] == "completed", "a place is more than a session"
            with pytest.raises(ActionRefused):
                await source.act(Action(ActionKind.CANCEL, session.id))
            with pytest.raises(ActionRefused):
                await source.act(Action(ActionKind.FORK, "a" * 26))


THINKS = "Two words.</think><response>It is 42.</response></message>!"


async def test_a_monitor_reads_what_a_session_says_and_talks_to_a_fork(tmp_path: Path) -> None:
    async with serving_model(ReplyModel(lambda prompt: THINKS), store=tmp_path / "s") as client:
        await client.post("/v1/responses", {"input": "6 times 7?"})
        async with HttpSource("http://server", transport=httpx.ASGITransport(client.app)) as source:
            (session,) = (await source.status()).sessions
            detail = await source.detail(session.id)
            assert detail is not None
            said = [(one.voice, one.text) for one in detail.passages if one.voice is not Voice.SYSTEM]
            assert said == [(Voice.USER, "6 times 7?"), (Voice.REASONING, "Two words."), (Voice.ANSWER, "It is 42.")]
            assert detail.nodes[-1].position == detail.position == session.position
            fork = await source.act(Action(ActionKind.FORK, session.id, "chat"))
            assert fork.session_id is not None
            pieces = [one async for one in source.say(fork.session_id, "sure?")]
            spoken = {voice: "".join(one.text for one in pieces if one.voice is voice) for voice in Voice}
            assert (spoken[Voice.REASONING], spoken[Voice.ANSWER]) == ("Two words.", "It is 42.")
            after = await source.detail(session.id)
            assert after is not None
            assert after.position == detail.position, "the session itself heard nothing"
            with pytest.raises(ActionRefused, match="empty"):
                assert [one async for one in source.say(fork.session_id, "")]
            assert await source.detail("a" * 26) is None


async def test_without_a_key_there_are_figures_and_nothing_else(tmp_path: Path) -> None:
    options = ServerOptions(api_keys=("one",), early_headers_s=30.0, shutdown_s=1.0)
    async with serving_model(ReplyModel(lambda prompt: THINKS), options, store=tmp_path / "s") as client:
        made = await client.call("POST", "/v1/responses", {"input": "secret"}, key="one")
        assert made.status == 200
        transport = httpx.ASGITransport(client.app)
        async with HttpSource("http://server", key="one", transport=transport) as own:
            (session,) = (await own.status()).sessions
            await own.act(Action(ActionKind.LABEL, session.id, "private"))
            assert (await own.about()).may_act
        async with HttpSource("http://server", transport=transport) as source:
            assert (await source.status()).namespaces == ()
            (seen,) = (await source.status()).sessions
            assert (seen.id, seen.position, seen.label, seen.namespace) == (session.id, session.position, "", "")
            assert not (await source.about()).may_act
            assert await source.detail(session.id) is None
            assert [one async for one in source.events()] == []
            for kind in ActionKind:
                with pytest.raises(ActionRefused, match="wants a key"):
                    await source.act(Action(kind, session.id, "x"))
            with pytest.raises(ActionRefused, match="wants a key"):
                assert [one async for one in source.say(session.id, "hi")]
            with pytest.raises(ActionRefused, match="wants a key"):
                await source.export(session.id, tmp_path / "x")
        async with HttpSource("http://server", key="two", transport=transport) as wrong:
            with pytest.raises(SourceUnreachable, match="wants a key"):
                await wrong.status()


async def test_whoever_watches_is_told_of_the_end_of_own_sessions_and_nothing_of_others() -> None:
    """The session is gone by the time its end is told."""
    options = ServerOptions(api_keys=("one", "two"), early_headers_s=30.0, shutdown_s=1.0)
    async with serving_model(ReplyModel(lambda prompt: THINKS), options) as client:
        watching = client.start("GET", "/serai/events", key="one")
        while not watching.status:
            await anyio.lowlevel.checkpoint()
        runtime = client.service.runtime
        sessions = {}
        for key in ("two", "one"):
            known = {session.id for session in runtime.status().sessions}
            assert (await client.call("POST", "/v1/responses", {"input": "hi"}, key=key)).status == 200
            (sessions[key],) = (one.id for one in runtime.status().sessions if one.id not in known)
        for session_id in sessions.values():
            session = runtime.find(session_id)
            assert session is not None
            await session.close()

        def told() -> list[tuple[str, str]]:
            lines = b"".join(watching.chunks).decode().split("\n")
            found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
            return [(one["session_id"], one["kind"]) for one in found]

        with anyio.fail_after(5):
            while (sessions["one"], "closed") not in told():
                await watching.wait_chunks(len(watching.chunks) + 1)
        assert (sessions["one"], "opened") in told()
        assert sessions["two"] not in {session_id for session_id, _ in told()}
        watching.leave()
        await watching.ended.wait()


async def test_a_session_that_requests_go_on_from_is_not_talked_to() -> None:
    """What a monitor says to it would stand in the client's conversation, which its client never sent."""
    model = ReplyModel(lambda prompt: "ok</response></message>!")
    async with serving_model(model) as client:
        first = await client.chat(user("hi"), reasoning_effort="none")
        async with HttpSource("http://server", transport=httpx.ASGITransport(client.app)) as source:
            (session,) = (await source.status()).sessions
            with pytest.raises(ActionRefused, match="fork it and talk to the fork"):
                assert [one async for one in source.say(session.id, "not the client's words")]
            assert (await source.status()).sessions[0].position == session.position
        message = first["choices"][0]["message"]
        more = await client.chat(user("hi"), message, user("more"), reasoning_effort="none")
        assert more["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "it went on from the session"
        assert "more" in model.prompts[-1]
        assert not any("the client's words" in prompt for prompt in model.prompts)


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "via", "x-real-ip"])
async def test_figures_are_not_for_who_comes_through_a_proxy_or_from_elsewhere(header: str) -> None:
    options = ServerOptions(api_keys=("one",), early_headers_s=30.0, shutdown_s=1.0)
    async with serving_model(ReplyModel(lambda prompt: THINKS), options) as client:
        for transport, headers in (
            (httpx.ASGITransport(client.app), {header: "203.0.113.9"}),
            (httpx.ASGITransport(client.app, client=("203.0.113.9", 1)), {}),
        ):
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as asking:
                assert (await asking.get("/serai/status", headers=headers)).status_code == 401
                assert (await asking.get("/serai/model", headers=headers)).status_code == 401
