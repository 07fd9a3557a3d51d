"""Generations held by a grammar, with the trained model: what comes is valid, and its bits depend on nothing else."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serai.runtime import SamplingParams, open_runtime
from serai.runtime.chat import Held, Message, Reply, collect
from serai.runtime.errors import BadParameter, GrammarFailed
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.grammar import Grammar, Grammars, json_rule
from serai.runtime.services import Policy
from serai.runtime.sessions.session import Session
from tests.runtime.chat.json_values import allows, schemas
from tests.runtime.chat.scripts import mint

pytestmark = pytest.mark.anyio

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "<|close|>", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PERSON}}
PARAMS = SamplingParams(max_tokens=400, temperature=1.0, seed=5)


def json_alone(schema: dict[str, Any], stop_ids: list[int]) -> str:
    """A grammar of JSON without a message around it, ended by one of these tokens."""
    return f"start: value <[{','.join(map(str, stop_ids))}]>\nvalue: {json_rule(schema)}\n"


@cache
def grammars(runtime: Runtime) -> Grammars:
    tokenizer = runtime.tokenizer
    assert tokenizer is not None
    return Grammars(tokenizer)


@asynccontextmanager
async def nano(store: Path | None = None, *, guess: bool = True) -> AsyncIterator[Runtime]:
    async with open_runtime("nano", budget="512MiB", store=store, policy=Policy(guess=guess)) as runtime:
        yield runtime


async def begun(runtime: Runtime, held: Held, *, thinking: bool = False) -> tuple[Session, Grammar, Any]:
    """A session at the beginning of a reply, its grammar, and where its conversation stands."""
    form = runtime.chat_format()
    opening = form.markup.begin(form.markup.options(thinking=thinking))
    asked = form.markup.append(opening.cursor, [Message.user("The home of Mira is the red box. Where is it?")])
    prompt = form.markup.prompt(asked.cursor)
    session = await runtime.session()
    await session.append(form.encode(opening.segments + asked.segments + prompt.segments))
    return session, grammars(runtime).compile(form.grammar(prompt.cursor, held)), prompt.cursor


async def written(session: Session, grammar: Grammar, params: SamplingParams = PARAMS) -> list[int]:
    done = await session.generate(params, grammar=grammar).collect()
    return list(done.tokens)


def read(runtime: Runtime, cursor: Any, ids: list[int]) -> Reply:
    parser = runtime.chat_format().parser(cursor, mint)
    events = [event for token in ids for event in parser.push(token)]
    return collect([*events, *parser.finish()])


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(cases=st.lists(st.tuples(schemas(), st.integers(0, 3)), min_size=8, max_size=8))
def test_any_schema_gives_json_that_it_allows(cases: list[tuple[dict[str, Any], int]]) -> None:
    async def check() -> None:
        async with nano() as runtime:
            for schema, seed in cases:
                session, grammar, cursor = await begun(runtime, Held(schema))
                reply = read(
                    runtime, cursor, await written(session, grammar, SamplingParams(max_tokens=1500, seed=seed))
                )
                assert reply.stopped
                assert allows(schema, json.loads(reply.message.text))
                await session.close()

    anyio.run(check)


@pytest.mark.parametrize(
    "held", [Held(PERSON), Held(tools=(TOOL,), least_calls=1, most_calls=2)], ids=["schema", "call"]
)
async def test_the_same_bits_from_every_token_border(held: Held, tmp_path: Path) -> None:
    """Forked and resumed after each token of a reply, the rest of it is the same, and so are the logits at its end."""
    async with nano(tmp_path / "store") as runtime:
        session, grammar, cursor = await begun(runtime, held)
        start = session.position
        first = await session.pause()
        whole_session = await runtime.resume(first)
        whole = await written(whole_session, grammar)
        logits = await whole_session.logits()
        reply = read(runtime, cursor, whole)
        assert reply.stopped
        arguments = reply.message.calls[0].arguments if held.tools else reply.message.text
        assert set(json.loads(arguments)) == set(PERSON["properties"])
        for border in range(0, len(whole) + 1, 3):
            one = await runtime.resume(first)
            part = whole[:0] if border == 0 else await written(one, grammar, _cut(border))
            assert part == whole[:border]
            if border % 2:
                fork = await one.twin()  # a fork would draw other numbers
            else:
                fork = await runtime.resume(await one.pause())
            rest = await written(fork, grammar, _cut(400 - border)) if border < len(whole) else []
            assert part + rest == whole, f"after {border} tokens"
            assert np.array_equal(await fork.logits(), logits)
            assert fork.position == start + len(whole)
            for each in (fork, one):
                await each.close() if each.is_open else None


def _cut(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=1.0, seed=5)


async def test_guessing_ahead_gives_the_same_tokens_in_fewer_steps() -> None:
    """What must follow is read ahead and checked against the grammar like any guess."""
    said: list[list[int]] = []
    steps: list[int] = []
    for guess in (False, True):
        async with nano(guess=guess) as runtime:
            session, grammar, _ = await begun(runtime, Held(tools=(TOOL,), least_calls=1, most_calls=1))
            before = runtime.counters.steps
            said.append(await written(session, grammar))
            steps.append(runtime.counters.steps - before)
    assert said[0] == said[1]
    assert steps[1] < 0.8 * steps[0]


async def test_text_alone_can_be_held_and_the_grammar_is_recorded(tmp_path: Path) -> None:
    async with nano(tmp_path / "store") as runtime:
        stops = sorted(runtime.chat_format().stop_ids)
        text = json_alone(PERSON, stops)
        session = await runtime.session()
        await session.append("A person: ")
        grammar = grammars(runtime).compile(text)
        ids = await written(session, grammar, replace(PARAMS, stop_token_ids=stops))
        assert ids[-1] in stops
        tokenizer = runtime.tokenizer
        assert tokenizer is not None
        assert set(json.loads(tokenizer.decode(ids))) == set(PERSON["properties"])
        recorded = [(node.sampler or {}).get("params") or {} for node in session.record.nodes()]
        assert grammar.digest in [params.get("grammar") for params in recorded]


async def test_a_turn_that_began_otherwise_can_not_be_held(tmp_path: Path) -> None:
    """The session stays as it was."""
    async with nano() as runtime:
        session, grammar, _ = await begun(runtime, Held(PERSON))
        await session.generate(SamplingParams(max_tokens=3, temperature=0)).collect()
        before = session.tokens()
        with pytest.raises(BadParameter, match="does not follow its grammar"):
            await written(session, grammar)
        assert np.array_equal(session.tokens(), before)
        assert len((await session.generate(SamplingParams(max_tokens=2)).collect()).tokens) == 2


async def test_a_grammar_that_is_complete_says_so() -> None:
    """With a stop token that ends nothing."""
    async with nano() as runtime:
        session = await runtime.session()
        await session.append("True or false? ")
        stray = runtime.chat_format().tokenizer.token_id("<|sep|>")
        grammar = grammars(runtime).compile(json_alone({"type": "boolean"}, [stray]))
        with pytest.raises(GrammarFailed, match="complete"):
            await written(session, grammar)
        assert session.is_open


async def test_stop_tokens_wait_for_min_tokens_only_while_others_may_come() -> None:
    async with nano() as runtime:
        session, grammar, _ = await begun(runtime, Held({"type": "boolean"}))
        params = SamplingParams(max_tokens=50, min_tokens=40, seed=1)
        done = await session.generate(params, grammar=grammar).collect()
        assert done.tokens[-1] in runtime.chat_format().stop_ids
        assert len(done.tokens) < 40
