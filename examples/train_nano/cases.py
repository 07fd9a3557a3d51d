"""Held-out evaluation questions: `cases(task, distance_tokens, n, seed, tokenizer) -> list[Case]`. No torch.

Every case is a conversation up to the point where the assistant must answer, and the sentence it must write. The seeds
used here are above 2^50 and those of training below 2^48, so no evaluation dialogue was trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import facts
from .facts import Fact
from .markup import Message, encode, render
from .tokenizer import NanoTokenizer

ACKNOWLEDGED = "I have read the notebook."
HELD_OUT = 2**50


@dataclass(frozen=True, slots=True)
class Case:
    """`messages` end with the user's question. The whole right reply is `answer`; `answer_value` is the part that was
    told (`answer[value_start:]` begins with it). `distance_tokens` counts from the fact's last token to the end of the
    prompt."""

    task: str
    messages: tuple[Message, ...]
    question: str
    answer: str
    answer_value: str
    value_start: int
    prompt_ids: tuple[int, ...]
    distance_tokens: int


def prompt_ids(messages: tuple[Message, ...], tokenizer: NanoTokenizer) -> tuple[int, ...]:
    """Thinking off: the prompt ends with an open `response` channel."""
    return tuple(encode(render(messages, thinking=False), tokenizer))


def notebook(
    rng: Random, tokens: int, tokenizer: NanoTokenizer, first: tuple[Fact, ...], taken: set[tuple[str, str]]
) -> str:
    """About `tokens` tokens of text beginning with the facts `first`: half facts (at most 250 of them), half filler."""
    sentences = [fact.statement() for fact in first]
    used = sum(len(tokenizer.text_ids(s)) for s in sentences)
    others = 0
    while used < tokens:
        if others < 250 and rng.random() < 0.5:
            sentence = facts.told(rng, facts.random_fact(rng, taken))
            others += 1
        else:
            sentence = facts.filler(rng)
        sentences.append(sentence)
        used += len(tokenizer.text_ids(" " + sentence))
    return " ".join(sentences)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _case(task: str, messages: list[Message], answer: str, value: str, told: str, tokenizer: NanoTokenizer) -> Case:
    ids = prompt_ids(tuple(messages), tokenizer)
    before = next(i for i, m in enumerate(messages) if told in m["content"])
    text = messages[before]["content"]
    cut = text.index(told) + len(told)
    head = [*messages[:before], _user(text[:cut])]
    position = len(encode(render(head, thinking=False, add_generation_prompt=False), tokenizer)) - 4
    start = answer.index(value, answer.index(" is ") + 4) if " is " in answer else answer.index(value)
    question = messages[-1]["content"]
    return Case(task, tuple(messages), question, answer, value, start, ids, len(ids) - position)


def _recall(rng: Random, distance: int, tokenizer: NanoTokenizer) -> Case:
    """A fact at the start of the notebook, asked in the next turn."""
    taken: set[tuple[str, str]] = set()
    fact = facts.random_fact(rng, taken)
    text = notebook(rng, max(distance - 55, 1), tokenizer, (fact,), taken)
    messages = [_user(text), _assistant(ACKNOWLEDGED), _user(facts.question(None, *fact.key))]
    return _case("recall", messages, fact.answer(), fact.value, fact.statement(), tokenizer)


def _corrected(rng: Random, distance: int, tokenizer: NanoTokenizer) -> Case:
    """A fact at the start of the notebook, corrected in its own turn after it, asked in the turn after that."""
    taken: set[tuple[str, str]] = set()
    fact = facts.random_fact(rng, taken)
    new = fact.with_value(facts.random_value(rng, fact.attribute, fact.entity, unlike=fact.value))
    text = notebook(rng, max(distance - 100, 1), tokenizer, (fact,), taken)
    messages = [_user(text), _assistant(ACKNOWLEDGED), _user(facts.corrected(None, new)), _assistant("Noted.")]
    messages.append(_user(facts.question(None, *fact.key)))
    return _case("corrected", messages, new.answer(), new.value, fact.statement(), tokenizer)


def _correction_kept(rng: Random, distance: int, tokenizer: NanoTokenizer) -> Case:
    """The fact and its correction stand at the start; then comes the long rest of the notebook, then the question."""
    taken: set[tuple[str, str]] = set()
    fact = facts.random_fact(rng, taken)
    new = fact.with_value(facts.random_value(rng, fact.attribute, fact.entity, unlike=fact.value))
    rest = notebook(rng, max(distance - 120, 1), tokenizer, (), taken)
    told = facts.corrected(None, new)
    messages = [_user(fact.statement()), _assistant(ACKNOWLEDGED), _user(told), _assistant("Noted.")]
    messages += [_user(rest), _assistant(ACKNOWLEDGED)] if rest else []
    messages.append(_user(facts.question(None, *fact.key)))
    return _case("correction_kept", messages, new.answer(), new.value, told, tokenizer)


def _untouched(rng: Random, distance: int, tokenizer: NanoTokenizer) -> Case:
    """As `corrected`, but another fact was corrected: the asked one must keep its value."""
    taken: set[tuple[str, str]] = set()
    fact, other = facts.random_fact(rng, taken), facts.random_fact(rng, taken)
    new = other.with_value(facts.random_value(rng, other.attribute, other.entity, unlike=other.value))
    text = notebook(rng, max(distance - 100, 1), tokenizer, (fact, other), taken)
    messages = [_user(text), _assistant(ACKNOWLEDGED), _user(facts.corrected(None, new)), _assistant("Noted.")]
    messages.append(_user(facts.question(None, *fact.key)))
    return _case("untouched", messages, fact.answer(), fact.value, fact.statement(), tokenizer)


def _absent(rng: Random, distance: int, tokenizer: NanoTokenizer) -> Case:
    """A key the notebook never mentions (its entity or its attribute may well occur)."""
    taken: set[tuple[str, str]] = set()
    fact = facts.random_fact(rng, taken)
    text = notebook(rng, max(distance - 55, 1), tokenizer, (fact,), taken)
    key = facts.neighbour_key(rng, [fact], taken)
    messages = [_user(text), _assistant(ACKNOWLEDGED), _user(facts.question(None, *key))]
    return _case("absent", messages, facts.NOT_KNOWN, facts.NOT_KNOWN, fact.statement(), tokenizer)


def _count(rng: Random, distance: int, tokenizer: NanoTokenizer) -> Case:
    """How many things are on a list told at the start."""
    taken: set[tuple[str, str]] = set()
    fact = facts.random_fact(rng, taken, "list")
    text = notebook(rng, max(distance - 55, 1), tokenizer, (fact,), taken)
    answer = facts.count_answer(fact)
    value = answer.split(" has ")[1].rstrip(".")
    messages = [_user(text), _assistant(ACKNOWLEDGED), _user(facts.count_question(None, fact.entity))]
    return _case("count", messages, answer, value, fact.statement(), tokenizer)


TASKS: dict[str, Callable[[Random, int, NanoTokenizer], Case]] = {
    "recall": _recall,
    "corrected": _corrected,
    "correction_kept": _correction_kept,
    "untouched": _untouched,
    "absent": _absent,
    "count": _count,
}


def cases(task: str, distance_tokens: int, n: int, seed: int, tokenizer: NanoTokenizer) -> list[Case]:
    """`n` held-out cases of one of TASKS whose fact lies about `distance_tokens` tokens before the answer."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; it must be one of {', '.join(TASKS)}")
    offset = list(TASKS).index(task) * 10_000_000 + distance_tokens * 1000
    return [
        TASKS[task](Random(HELD_OUT + seed * 1_000_000_000 + offset + i), distance_tokens, tokenizer) for i in range(n)
    ]
