"""API keys: whose sessions a request sees, what it may take, how urgent it is and how long it may take."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from serai.runtime.driver import Driver
from serai.runtime.errors import BadParameter
from serai.runtime.memory.accounts import Quota
from serai.runtime.monitor.source import ActionKind
from serai.runtime.server.callers import Key, Keys, quotas_of
from serai.runtime.server.errors import RETRY_AFTER_S
from serai.runtime.server.options import ServerOptions, parse_setting, read_options_file
from tests.runtime.server.client import serving_model, user
from tests.runtime.server.replies import ANY, ReplyModel
from tests.runtime.server.steps import Steps

pytestmark = pytest.mark.anyio

SHORT = "</think><response>ok</response></message>!"
LONG = f"</think><response>{ANY * 3000}</response></message>!"
USER = 'role="user"'
CHAT = "/v1/chat/completions"


def options(*keys: Key, **more: Any) -> ServerOptions:
    return ServerOptions(keys=keys, early_headers_s=30.0, keep_alive_s=30.0, shutdown_s=1.0, **more)


def asks(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [user(text)], **more}


def test_a_file_says_what_each_key_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_B", "b-secret")
    file = tmp_path / "serve.toml"
    file.write_text(
        """
        model = "nano"
        [server]
        api_keys = ["plain"]
        [[server.keys]]
        key = "a-secret"
        namespace = "team-a"
        priority = 1
        most_priority = 3
        deadline_s = 60
        sessions = 8
        state_bytes = "2MiB"
        [[server.keys]]
        key_env = "TEAM_B"
        """,
        encoding="utf-8",
    )
    given = ServerOptions.of(read_options_file(file)["server"])
    plain, first, second = given.all_keys
    quota = Quota(sessions=8, state_bytes=2 << 20)
    assert first == Key(secret="a-secret", namespace="team-a", priority=1, most_priority=3, deadline_s=60, quota=quota)
    assert (plain.secret, second.secret) == ("plain", "b-secret")
    assert len({one.namespace for one in given.all_keys}) == 3
    assert quotas_of(given.all_keys) == {"team-a": quota}
    keys = Keys(given.all_keys)
    assert keys.holder(b"Bearer a-secret") == first
    assert keys.holder(b"bearer  b-secret ") == second
    assert [keys.holder(header) for header in (b"", b"Bearer ", b"a-secret", b"Bearer a-secre", b"Basic plain")] == [
        None
    ] * 5


def test_a_flag_sets_what_a_file_can() -> None:
    assert parse_setting("max_active=3") == {"max_active": 3}
    assert parse_setting("host = ::1") == {"host": "::1"}
    given = ServerOptions.of(parse_setting('keys = [{key = "x", namespace = "a", waiting = 0}]'))
    assert given.all_keys == (Key(secret="x", namespace="a", quota=Quota(waiting=0)),)
    with pytest.raises(BadParameter, match="write NAME=VALUE"):
        parse_setting("max_active")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ({}, "key or as key_env"),
        ({"key": "a", "key_env": "B"}, "one of them"),
        ({"key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"key": ""}, "printable ASCII"),
        ({"key": 7}, "is text"),
        ({"key": "a", "colour": "red"}, "'colour' is nothing"),
        ({"key": "a", "priority": 9}, "priority is 9"),
        ({"key": "a", "priority": 2, "most_priority": 1}, "under the priority"),
        ({"key": "a", "priority": True}, "no int"),
        ({"key": "a", "deadline_s": 0}, "more than 0"),
        ({"key": "a", "sessions": 0}, "sessions is 0"),
        ({"key": "a", "state_bytes": "much"}, "state_bytes is 'much'"),
        ({"key": "a", "namespace": " a"}, "spaces at its ends"),
        ({"key": "a", "namespace": "a: b"}, "can't contain ': '"),
        ({"key": "a", "may_pause": 1}, "no bool"),
    ],
)
def test_a_wrong_key_is_refused_with_a_sentence(key: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerOptions.of({"keys": [key]})


def test_keys_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadParameter, match="given twice"):
        options(Key(secret="a"), Key(secret="a", namespace="b"))
    with pytest.raises(BadParameter, match="different quotas"):
        options(Key(secret="a", quota=Quota(sessions=2)), Key(secret="b", quota=Quota(sessions=3)))
    with pytest.raises(BadParameter, match="a namespace with a name"):
        options(Key(secret="a"), Key(secret="b", namespace="b"))
    options(Key(secret="a", quota=Quota(sessions=2)), Key(secret="b"))  # the second shares the first one's


async def test_who_has_used_up_its_quota_is_told_to_come_back_and_others_are_served() -> None:
    small = Key(secret="small", namespace="s", quota=Quota(sessions=3))
    model = ReplyModel(lambda prompt: SHORT)
    async with serving_model(model, options(small, Key(secret="large", namespace="l"))) as client:
        refused = await client.call("POST", CHAT, asks("x", n=4), key="small")
        assert (refused.status, refused.headers["retry-after"]) == (429, str(RETRY_AFTER_S))
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "over_quota")
        assert "its quota is 3" in error["message"]
        assert client.service.runtime.status().sessions == (), "nothing of it is left"
        assert (await client.call("POST", CHAT, asks("x", n=4), key="large")).status == 200
        assert (await client.call("POST", CHAT, asks("x", n=3), key="small")).status == 200


async def test_a_choice_that_is_refused_halfway_leaves_nothing() -> None:
    """Replies to notes have two sessions each; when the second one's was refused, its first was nobody's any more."""
    key = Key(secret="k", namespace="n", quota=Quota(sessions=3))
    async with serving_model(ReplyModel(lambda prompt: SHORT), options(key)) as client:
        noted = asks("x", n=2, response_format={"type": "json_object"})
        refused = await client.call("POST", CHAT, noted, key="k")
        assert (refused.status, refused.json()["error"]["code"]) == (429, "over_quota")
        assert client.service.runtime.status().sessions == ()


async def test_places_kept_hot_are_no_sessions_of_a_quota(tmp_path: Path) -> None:
    key = Key(secret="k", namespace="n", quota=Quota(sessions=1))
    model = ReplyModel(lambda prompt: f"</think><response>{prompt.count(USER)}</response></message>!")
    async with serving_model(model, options(key), store=tmp_path / "s") as client:
        ids = []
        for _ in range(4):
            made = (await client.call("POST", "/v1/responses", {"input": "hi"}, key="k")).json()
            assert made["status"] == "completed", made
            ids.append(made["id"])
        for id_ in ids:
            body = {"input": "more", "previous_response_id": id_}
            made = (await client.call("POST", "/v1/responses", body, key="k")).json()
            assert made["output"][-1]["content"][0]["text"] == "2", made
        status = client.service.runtime.status()
        assert len(status.sessions) == 8, "all are kept as they stand"
        (account,) = (one for one in status.namespaces if one.namespace == "n")
        assert account.sessions == 0, "and none of them counts"
        refused = await client.call("POST", CHAT, asks("x", n=2), key="k")
        assert (refused.status, refused.json()["error"]["code"]) == (429, "over_quota")
        await client.service.sessions.close()
        assert account.sessions == 0, "nor is one taken off twice"


async def test_a_request_is_as_urgent_as_its_key_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: set[float] = set()
    advance = Driver.advance

    async def noted(self: Driver, *arguments: Any, weight: float = 1.0, **named: Any) -> Any:
        weights.add(weight)
        return await advance(self, *arguments, weight=weight, **named)

    monkeypatch.setattr(Driver, "advance", noted)
    key = Key(secret="k", priority=1, most_priority=2)
    async with serving_model(ReplyModel(lambda prompt: SHORT), options(key)) as client:
        for body, weight in ((asks("a"), 2.0), (asks("b", **{"serai:priority": -3}), 0.125)):
            assert (await client.call("POST", CHAT, body, key="k")).status == 200
            assert weights == {weight}
            weights.clear()
        text = {"prompt": "x", "serai:priority": 2, "max_tokens": 2}
        assert (await client.call("POST", "/v1/completions", text, key="k")).status == 200
        assert weights == {4.0}
        for priority in (3, -5, 1.5, "1", True):
            refused = await client.call("POST", CHAT, asks("c", **{"serai:priority": priority}), key="k")
            assert (refused.status, refused.json()["error"]["param"]) == (400, "serai:priority")


async def test_a_reply_that_is_not_done_in_time_ends_with_what_it_has() -> None:
    steps = Steps()
    model = ReplyModel(lambda prompt: LONG, before_step=steps)
    async with serving_model(model, limits=steps.limits) as client:
        soon = {"serai:deadline_s": 1.5}
        exchanges = [
            client.start("POST", CHAT, asks("hi", **soon)),
            client.start("POST", CHAT, asks("hi", stream=True, **soon)),
            client.start("POST", "/v1/responses", {"input": "hi", **soon}),
        ]
        await steps.let(8)
        chat, stream, response = exchanges
        with anyio.fail_after(10):
            choice = (await chat.body())["choices"][0]
            last = (await stream.events())[-1]["choices"][0]
            document = await response.body()
        assert (choice["finish_reason"], choice["serai:cut_by"]) == ("length", "deadline")
        assert (last["finish_reason"], last["serai:cut_by"]) == ("length", "deadline")
        assert (document["status"], document["incomplete_details"]) == ("incomplete", {"reason": "serai:deadline"})
        steps.free()
        further = {"input": "x", "previous_response_id": document["id"], "max_output_tokens": 3}
        again = await client.call("POST", "/v1/responses", further)
        assert again.json()["status"] == "incomplete", "a reply that was cut short is a place like any other"


@pytest.mark.parametrize("bound", ["request", "key"])
async def test_what_is_not_begun_in_time_is_a_408_that_no_library_repeats(bound: str) -> None:
    steps = Steps()
    model = ReplyModel(lambda prompt: SHORT, before_step=steps)
    key = Key(secret="k", deadline_s=0.2 if bound == "key" else 100.0)
    async with serving_model(model, options(key), limits=steps.limits) as client:
        body = asks("hi", **{"serai:deadline_s": 1000.0 if bound == "key" else 0.2})
        with anyio.fail_after(10):
            late = await client.call("POST", CHAT, body, key="k")
            assert (late.status, late.headers["x-should-retry"]) == (408, "false")
            assert late.json()["error"]["code"] == "deadline_missed"
            streamed = await client.call("POST", CHAT, {**body, "stream": True}, key="k")
            assert streamed.status == 408
        steps.free()
        wrong = await client.call("POST", CHAT, asks("hi", **{"serai:deadline_s": 0}), key="k")
        assert (wrong.status, wrong.json()["error"]["param"]) == (400, "serai:deadline_s")


async def test_a_deadline_passes_also_while_the_engine_is_paused() -> None:
    async with serving_model(ReplyModel(lambda prompt: SHORT)) as client:
        assert (await client.call("POST", "/pause?mode=keep")).status == 200
        with anyio.fail_after(10):
            for path, body in ((CHAT, asks("hi")), ("/v1/completions", {"prompt": "x"})):
                late = await client.call("POST", path, {**body, "serai:deadline_s": 0.1})
                assert late.status == 408


async def test_a_key_is_told_of_its_own_namespace_only() -> None:
    keys = [Key(secret=name, namespace=name, quota=Quota(sessions=9)) for name in ("a", "b")]
    async with serving_model(ReplyModel(lambda prompt: SHORT), options(*keys)) as client:
        for name in ("a", "b"):
            assert (await client.call("POST", CHAT, asks("hi"), key=name)).status == 200
        seen = (await client.call("GET", "/serai/status", key="a")).json()["namespaces"]
        assert [one["namespace"] for one in seen] == ["a"]
        assert (await client.call("GET", "/serai/status")).status in (200, 401)


async def test_what_one_key_made_no_other_reaches(tmp_path: Path) -> None:
    keys = [Key(secret=name, namespace=name) for name in ("a", "b")]
    async with serving_model(ReplyModel(lambda prompt: SHORT), options(*keys), store=tmp_path / "s") as client:
        id_ = (await client.call("POST", "/v1/responses", {"input": "hi"}, key="a")).json()["id"]
        assert (await client.call("POST", f"/v1/responses/{id_}/serai:tag", {"tag": "best"}, key="a")).status == 200
        (session,) = (await client.call("GET", "/serai/status", key="a")).json()["sessions"]
        own = (await client.call("POST", "/v1/responses", {"input": "hi"}, key="b")).json()["id"]
        (other,) = (await client.call("GET", "/serai/status", key="b")).json()["sessions"]

        async def theirs(method: str, path: str, body: dict[str, Any] | None = None) -> int:
            return (await client.call(method, path, body, key="b")).status

        place, live = f"/v1/responses/{id_}", f"/serai/sessions/{session['id']}"
        for path in (place, f"{place}?stream=true", f"{place}/input_items", f"{live}/detail", f"{live}/export"):
            assert await theirs("GET", path) == 404, path
        for last in ("cancel", "pause", "resume", "serai:fork"):
            assert await theirs("POST", f"{place}/{last}") == 404, last
        assert await theirs("POST", f"{place}/serai:tag", {"tag": "x"}) == 404
        assert await theirs("POST", "/v1/responses", {"input": "x", "previous_response_id": id_}) == 404
        assert await theirs("POST", "/v1/responses/input_tokens", {"input": "x", "previous_response_id": id_}) == 404
        assert await theirs("POST", f"{live}/say", {"text": "hi"}) == 404
        for kind in ActionKind:
            for named in (session["id"], "a: best"):
                action = {"action": kind.value, "session": named, "value": "x"}
                assert await theirs("POST", "/serai/actions", action) == 404, action
        assert await theirs("DELETE", place) == 404

        # Tags are one table in the store, where a key may neither move another's nor mark places as deleted.
        moved = {"action": "tag", "session": other["id"], "value": "a: best"}
        assert await theirs("POST", "/serai/actions", moved) == 200
        assert await theirs("POST", "/serai/actions", {**moved, "value": f"serai deleted {id_}"}) == 400
        assert await theirs("POST", f"/v1/responses/{own}/serai:tag", {"tag": f"serai deleted {id_}"}) == 400
        await theirs("DELETE", "/v1/serai:tags/best")
        tags = (await client.call("GET", "/v1/serai:tags", key="a")).json()["data"]
        assert [(one["tag"], one["response"]) for one in tags] == [("best", id_)]
        assert (await client.call("GET", place, key="a")).json()["status"] == "completed"


async def test_among_several_namespaces_a_key_must_be_let_to_pause_them_all() -> None:
    keys = [Key(secret="a", namespace="a"), Key(secret="b", namespace="b", may_pause=True)]
    async with serving_model(ReplyModel(lambda prompt: SHORT), options(*keys)) as client:
        refused = await client.call("POST", "/pause?mode=abort", key="a")
        assert (refused.status, refused.json()["error"]["code"]) == (403, "not_allowed")
        assert (await client.call("POST", "/pause?mode=keep", key="b")).status == 200
        assert (await client.call("POST", "/resume", key="a")).status == 403
        assert (await client.call("POST", "/resume", key="b")).status == 200
    assert "b-secret" not in repr(options(Key(secret="b-secret")))
