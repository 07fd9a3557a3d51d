"""With the trained model: a generation is the same with guesses as without, however it draws and whatever ends it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serai.runtime import FinishReason, Runtime, SamplingParams, open_runtime
from serai.runtime.errors import GrammarFailed
from serai.runtime.sampling.grammar import Grammars, json_rule
from serai.runtime.sampling.guessing import Worth
from serai.runtime.services import Policy

TEXTS = (
    "red box, blue lamp, grey cat, " * 4,
    "The code of the red box is 4172. " * 4,
    "one two three four " * 6,
    "1 1 1 1 1 1 1 1 1 1",
)
SCHEMAS: tuple[Mapping[str, Any] | None, ...] = (
    None,
    {"type": "array", "items": {"enum": ["red box", "blue lamp", "grey cat"]}, "minItems": 4, "maxItems": 12},
)
"""The second one leaves choices between texts that repeat themselves."""

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.7]),
    logit_bias=st.dictionaries(st.integers(3, 300), st.sampled_from([-100.0, 2.0, 8.0]), max_size=3),
    seed=st.integers(0, 9),
    stop=st.lists(st.sampled_from(["red", "x, b", "t, ", "7", "th", " one two three", "e", "1 1 1"]), max_size=2),
    stop_token_ids=st.lists(st.integers(3, 300), max_size=2),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
)
cases = st.tuples(st.sampled_from(TEXTS), st.sampled_from(SCHEMAS), params, st.integers(0, 59))


async def written(rt: Runtime, case: tuple[str, Mapping[str, Any] | None, SamplingParams, int]) -> Any:
    """All that a reader sees of a generation, in two parts, and the bits that it leaves."""
    text, schema, wanted, cut = case
    stops = sorted(rt.chat_format().stop_ids)
    grammar = None
    if schema is not None:
        assert rt.tokenizer is not None
        rule = json_rule(schema)
        wanted = replace(wanted, stop_token_ids=[*wanted.stop_token_ids, *stops])
        grammar = Grammars(rt.tokenizer).compile(f"start: value <[{','.join(map(str, stops))}]>\nvalue: {rule}\n")
    async with await rt.session() as session:
        await session.append(text)
        seen: list[Any] = []
        first = session.generate(wanted, grammar=grammar)
        try:
            async for token in first:
                seen.append(token)
                if len(seen) > cut:
                    break
            await first.aclose()
            if first.finish_reason is FinishReason.CANCELLED:
                seen += [token async for token in session.generate(wanted, grammar=grammar)]
        except GrammarFailed as error:  # a stop string or token of the request's own may have cut it short before
            seen.append(str(error))
        return seen, first.finish_reason, session.tokens().tolist(), (await session.logits()).tobytes()


@given(some=st.lists(cases, min_size=6, max_size=6), guesses=st.sampled_from([1, 2, 5, 8, 32]))
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_that_is_drawn_shown_and_kept_is_the_same(
    some: list[tuple[str, Mapping[str, Any] | None, SamplingParams, int]],
    guesses: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Worth, "guesses", property(lambda self: guesses if self.step_s else 0)
    )  # the clock has no say here

    async def check() -> None:
        found = []
        for guess in (False, True):
            policy = Policy(reuse=False, guess=guess)
            async with open_runtime("nano", budget="512MiB", policy=policy) as rt:
                found.append([await written(rt, case) for case in some])
        for case, plain, guessed in zip(some, *found, strict=True):
            assert guessed == plain, case

    anyio.run(check)


async def _guessed_with(wanted: SamplingParams) -> tuple[int, str]:
    async with open_runtime("nano", budget="512MiB", policy=Policy(reuse=False)) as rt:
        session = await rt.session()
        await session.append(TEXTS[0])
        done = await session.generate(wanted).collect()
        return rt.counters.right_guesses, done.text


def test_a_generation_with_stop_strings_is_guessed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worth, "guesses", property(lambda self: 8 if self.step_s else 0))
    right, whole = anyio.run(_guessed_with, SamplingParams(max_tokens=40, temperature=0, stop=["never said"]))
    assert right > 5
    stop = whole[20:24]
    _, text = anyio.run(_guessed_with, SamplingParams(max_tokens=40, temperature=0, stop=[stop]))
    assert text == whole[: whole.index(stop)]
