"""Replies held by grammars: whatever a model would write, what it does write is what was asked for."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serai.runtime.chat import ChatFormat, Event, Held, Notes, Reply, chat_format_for, collect
from serai.runtime.errors import BadParameter
from serai.runtime.sampling.grammar import MOST_WHITESPACE, Grammars
from tests.runtime.chat.json_values import allows, objects, schemas
from tests.runtime.chat.scripts import mint
from tests.runtime.chat.tokenizers_for_tests import MODEL_TYPES, merging_tokenizer

ENOUGH_TOKENS = 3_000


@cache
def form(model_type: str) -> ChatFormat:
    return chat_format_for(model_type, merging_tokenizer(model_type))


@cache
def grammars(model_type: str) -> Grammars:
    return Grammars(merging_tokenizer(model_type))


def written(model_type: str, held: Held, seed: int, *, prefers: tuple[int, ...] = ()) -> tuple[Reply, list[int]]:
    """A reply of a model that draws any allowed token, or the first of those it prefers."""
    chat = form(model_type)
    cursor = chat.markup.prompt(chat.markup.begin(chat.markup.options()).cursor, Notes()).cursor
    point = grammars(model_type).compile(chat.grammar(cursor, held)).start
    random, controls, parser = np.random.default_rng(seed), chat.tokenizer.special_ids, chat.parser(cursor, mint)
    ids: list[int] = []
    events: list[Event] = []
    while not ids or ids[-1] not in chat.stop_ids:
        assert len(ids) < ENOUGH_TOKENS, "what is bounded comes to its end"
        allowed = np.flatnonzero(point.allowed())
        liked = [token for token in prefers if token in allowed]
        control = [token for token in allowed if token in controls]
        # A model that never chose to end its thoughts would think for ever: nothing bounds those.
        choices = liked or (control if control and random.random() < 0.2 else allowed)
        ids.append(int(choices[0] if liked else random.choice(choices)))
        events += parser.push(ids[-1])
        point = point.after(ids[-1])
        point.look_ahead()
    events += parser.finish()
    return collect(events), ids


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(schema=schemas(), seed=st.integers(0, 9))
def test_any_schema_gives_json_that_it_allows(model_type: str, schema: dict[str, Any], seed: int) -> None:
    reply, _ = written(model_type, Held(schema), seed)
    assert reply.stopped
    assert not reply.faults
    assert not reply.message.calls
    assert allows(schema, json.loads(reply.message.text))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    parameters=st.lists(objects(schemas(depth=1)), min_size=1, max_size=3),
    most=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_a_call_that_must_come_is_well_formed(
    model_type: str, parameters: list[dict[str, Any]], most: int, seed: int
) -> None:
    tools = tuple(
        {"type": "function", "function": {"name": f'f<|open|>"{place}', "parameters": one}}
        for place, one in enumerate(parameters)
    )
    reply, _ = written(model_type, Held(tools=tools, least_calls=1, most_calls=most), seed)
    assert reply.stopped
    assert not reply.faults
    assert not reply.message.text
    assert 1 <= len(reply.message.calls) <= most
    for call in reply.message.calls:
        schema = parameters[int(call.name.rpartition('"')[2])]
        assert allows(schema, json.loads(call.arguments))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"p": {"type": "string", "pattern": "^[ab]{2}$"}}, "required": ["p"]},
        {
            "type": "object",
            "$defs": {"K": {"enum": ["u", "v"]}, "N": {"type": "object", "properties": {"k": {"$ref": "#/$defs/K"}}}},
            "properties": {"k": {"$ref": "#/$defs/K"}, "n": {"type": "array", "items": {"$ref": "#/$defs/K"}}},
            "required": ["k", "n"],
        },
        {"anyOf": [{"required": ["x"]}, {"required": ["y"]}], "properties": {"x": {"const": 1}, "y": {"const": 2}}},
        {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"]},
        {"type": "object", "properties": {"c": {"type": "string", "format": "colour", "maxLength": 3}}},
    ],
)
def test_schemas_that_say_more_than_types_are_held_as_well(model_type: str, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {**parameters, "additionalProperties": False}}}
    for seed in range(4):
        reply, _ = written(model_type, Held(tools=(tool,), least_calls=1, most_calls=1), seed)
        arguments = json.loads(reply.message.calls[0].arguments)
        assert not reply.faults
        assert set(parameters.get("required", [])) <= arguments.keys() <= parameters["properties"].keys()
        assert set(arguments.get("p", "aa")) <= set("ab")
        assert arguments.get("k", "u") in ("u", "v")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_schema_that_refers_to_itself_means_all_of_the_arguments(model_type: str) -> None:
    """A member's schema compiled alone would take `#` for the member."""
    more = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 1}]}
    parameters = {
        "type": "object",
        "properties": {"name": {"enum": ["a"]}, "more": more},
        "required": ["name", "more"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    longest = 0
    for seed in range(8):
        reply, _ = written(model_type, Held(tools=(tool,), least_calls=1, most_calls=1), seed)
        node, depth = json.loads(reply.message.calls[0].arguments), 0
        while node is not None:
            assert node.keys() == {"name", "more"}
            node, depth = node["more"] and node["more"][0], depth + 1
        longest = max(longest, depth)
    assert longest > 1, "some of them do hold another"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_calls_that_may_not_come_do_not(model_type: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    names = {"<|open|>tools", "<|tool_calls_section_begin|>"}
    for seed in range(6):
        reply, ids = written(model_type, Held(tools=(tool,), most_calls=0), seed)
        spelled = form(model_type).tokenizer
        said = b"".join(spelled.token_bytes(token, control=True) for token in ids)
        assert not reply.message.calls
        assert not any(name.encode() in said for name in names)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_reply_that_may_call_or_answer_by_a_schema_does_one_of_them(model_type: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for seed in range(12):
        reply, _ = written(model_type, Held({"type": "boolean"}, (tool,)), seed)
        assert reply.message.calls or json.loads(reply.message.text) in (True, False)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_white_space_comes_to_an_end(model_type: str) -> None:
    """B97: a model that always prefers a space writes valid JSON in bounded tokens, and nothing after it."""
    tokenizer = merging_tokenizer(model_type)
    closing = tuple(tokenizer.token_id(name) for name in tokenizer.special_tokens if name in ("<|close|>",))
    spaces = tuple(token for token in range(256) if tokenizer.token_bytes(token) == b" ")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}},
        "required": ["n"],
        "additionalProperties": False,
    }
    reply, ids = written(model_type, Held(schema), 0, prefers=closing + spaces)
    assert json.loads(reply.message.text)["n"] in range(1, 6)
    assert reply.message.text.strip(" ") == reply.message.text
    longest = max(len(run) for run in reply.message.text.replace("{", "x").split("x") for run in [_blank(run)])
    assert longest <= MOST_WHITESPACE
    assert len(ids) < 200


def _blank(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


@pytest.mark.parametrize("schema", [{"type": "strange"}, {"not": {"type": "null"}}, {"$ref": "#/nowhere"}, False])
def test_a_schema_that_can_not_be_held_is_refused_by_name(schema: Any) -> None:
    chat = form("kimi_k3")
    cursor = chat.markup.prompt(chat.markup.begin(chat.markup.options()).cursor).cursor
    with pytest.raises(BadParameter, match="the grammar can't be held"):
        grammars("kimi_k3").compile(chat.grammar(cursor, Held(schema)))


def test_a_grammar_that_is_too_large_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(BadParameter, match="at most 1,048,576 are read"):
        grammars("kimi_k3").compile("start: TEXT\n" + "# more\n" * 200_000)


def test_what_does_not_follow_the_grammar_is_an_error() -> None:
    chat = form("kimi_linear")
    cursor = chat.markup.prompt(chat.markup.begin(chat.markup.options()).cursor).cursor
    start = grammars("kimi_linear").compile(chat.grammar(cursor, Held({"type": "boolean"}))).start
    with pytest.raises(BadParameter, match="does not follow its grammar"):
        start.after(*chat.tokenizer.encode("maybe")).allowed()
    assert start.allowed().any(), "others go on"


def test_a_point_is_a_value() -> None:
    """What is allowed after some tokens depends on them alone, however the points before were used."""
    chat = form("kimi_linear")
    cursor = chat.markup.prompt(chat.markup.begin(chat.markup.options()).cursor).cursor
    text = chat.grammar(cursor, Held({"type": "array", "items": {"type": "boolean"}}))
    start = grammars("kimi_linear").compile(text).start
    ids = chat.tokenizer.encode("[true, false]")
    points = [start]
    for token in ids:
        points.append(points[-1].after(token))
    forwards = [point.allowed().copy() for point in points]
    for place in (3, 0, len(ids), 1, 2):
        assert np.array_equal(points[place].allowed(), forwards[place])
        assert np.array_equal(start.after(*ids[:place]).allowed(), forwards[place])
        points[place].look_ahead()
