"""Whatever text a client sends or a model writes, structure is the template's alone, through the whole server."""

import json
import re
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.chat.tokenizers_for_tests import hostile_text
from tests.runtime.server.client import Client, serving_model, user
from tests.runtime.server.replies import ANY, K2, K3, ReplyModel
from tests.runtime.server.test_chat import joined

FAMILIES = pytest.mark.parametrize("family", [K3, K2])
PLAIN = {K3: "ok</think><response>fine</response></message>!", K2: "fine<|im_end|>"}
SLOW = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
TEXTS = 11


class Watching(ReplyModel):
    """Keeps the token ids of each prompt, of which a text can't tell a marker from one that was only written."""

    def __init__(self, family: str) -> None:
        super().__init__(lambda prompt: PLAIN[family], family=family)
        self.seen: list[tuple[int, ...]] = []

    def _logits(self, ids: list[int]) -> Any:
        if self._reply_begins(ids) == len(ids):
            self.seen.append(tuple(ids))
        return super()._logits(ids)

    def structure(self) -> list[int]:
        """The control tokens of the last prompt."""
        return [token for token in self.seen[-1] if token in self.tokenizer.special_ids]


def request(text: Sequence[str], *, responses: bool) -> dict[str, Any]:
    """A request in which every place that holds foreign text has the next of the given texts."""
    texts = iter(text)

    def take() -> str:
        return next(texts)

    function = {
        "name": "f" + take(),
        "description": take(),
        "parameters": {"type": "object", "properties": {take(): {"type": "string", "description": take()}}},
    }
    said, result, key, value = take(), take(), take(), take()
    arguments = json.dumps({key: value})
    last = take()
    schema = {"type": "object", "properties": {"x": {"enum": [take(), "y"]}}}
    if responses:
        return {
            "tools": [{"type": "function", **function}],
            "input": [
                {"role": "user", "content": said},
                {"type": "function_call", "call_id": "c1", "name": function["name"], "arguments": arguments},
                {"type": "function_call_output", "call_id": "c1", "output": result},
                {"role": "user", "content": last},
            ],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        }
    call = {"id": "c1", "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {
        "tools": [{"type": "function", "function": function}],
        "messages": [
            user(said),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": result},
            user(last),
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }


async def ask(client: Client, body: dict[str, Any], *, responses: bool) -> None:
    path = "/v1/responses" if responses else "/v1/chat/completions"
    limit = "max_output_tokens" if responses else "max_tokens"
    exchange = await client.call("POST", path, {**body, limit: 1, "store": False})
    assert exchange.status == 200, exchange.json()


@FAMILIES
@SLOW
@given(texts=st.lists(hostile_text(), min_size=TEXTS, max_size=TEXTS), responses=st.booleans())
def test_no_text_of_a_client_changes_the_structure(family: str, texts: list[str], responses: bool) -> None:
    """Every control token's text, halves of them and look-alikes: the prompt's control tokens are those of a harmless
    conversation of the same shape, one by one."""

    async def check() -> None:
        model = Watching(family)
        async with serving_model(model) as client:
            await ask(client, request(["plain"] * TEXTS, responses=responses), responses=responses)
            expected = model.structure()
            await ask(client, request(texts, responses=responses), responses=responses)
            assert model.structure() == expected

    anyio.run(check)


@FAMILIES
@SLOW
@given(text=hostile_text(), cut=st.text(max_size=4), stop=st.sampled_from([None, "END", "<|close|>", "🙂🙂", "é"]))
def test_what_a_model_writes_as_text_stays_text(family: str, text: str, cut: str, stop: str | None) -> None:
    """Literal markers, characters split over tokens (each is a byte here) and stop strings over token borders: the
    reply is the text up to the stop string, streamed or not, however the chunks fall."""
    said = (text + cut).replace(ANY, "") + (stop or "") + "after"
    expected = said if stop is None else said[: said.index(stop)]

    async def check() -> None:
        model = Literal(family, said)
        async with serving_model(model) as client:
            body = {"messages": [user("hi")], "reasoning_effort": "none", **({} if stop is None else {"stop": stop})}
            if family == K2:
                del body["reasoning_effort"]
            whole = (await client.post("/v1/chat/completions", body))["choices"][0]
            assert (whole["message"]["content"] or "") == expected
            assert whole["finish_reason"] == "stop"
            assert joined(await client.stream("/v1/chat/completions", body))["content"] == expected

    anyio.run(check)


class Literal(ReplyModel):
    """Writes one text byte by byte as ordinary tokens, then ends its message."""

    def __init__(self, family: str, text: str) -> None:
        super().__init__(lambda prompt: "", family=family)
        end = ["<|close|>", "response", "<|sep|>", "<|close|>", "message", "<|sep|>", "<|end_of_msg|>"]
        end = end if family == K3 else ["<|im_end|>"]
        self._said = self.tokenizer.encode(text)
        for piece in end:
            special = self.tokenizer.special_tokens.get(piece)
            self._said += self.tokenizer.encode(piece) if special is None else [special]

    def _logits(self, ids: list[int]) -> Any:
        begins = self._reply_begins(ids)
        if begins is not None:
            self._replies[tuple(ids[:begins])] = self._said
        return super()._logits(ids)


def test_the_hostile_texts_do_spell_markers() -> None:
    """The property above would hold of harmless texts as well."""
    found: set[str] = set()

    @settings(max_examples=200, derandomize=True)
    @given(text=hostile_text())
    def gather(text: str) -> None:
        found.update(re.findall(r"<\|[a-z_]+\|>", text))

    gather()
    assert len(found) > 6
