"""Held-out questions to the nano model: conversations that end where the assistant must answer from memory.

The language is that of the nano model's training (`recall_facts.py`); the seeds used here are above 2^50 and those of
training below 2^48, so no conversation was trained on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench import recall_facts as facts
from serai.runtime.bench.recall_facts import Fact
from serai.runtime.chat import ChatFormat, Message, PromptOptions, render

ACKNOWLEDGED = "I have read the notebook."
HELD_OUT = 2**50
MOST_FACTS = 250
"""In one notebook: more would use up the keys of the language."""

Taken = set[tuple[str, str]]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A question whose fact ends `distance_tokens` before the end of `prompt`.

    `prompt` int32 `[tokens]`; its first `memory_tokens` are all that comes before the question's message. The right
    reply is `answer`, of which `value`, from character `value_start`, is what had to be remembered. `chance` is how
    often the best guess by somebody who has read only the question is right.
    """

    task: str
    prompt: NDArray[np.int32]
    memory_tokens: int
    distance_tokens: int
    answer: str
    value: str
    value_start: int
    chance: float


@dataclass(frozen=True, slots=True)
class _Draft:
    """A case before it is encoded; `told` is the sentence that the distance is counted from."""

    messages: list[Message]
    answer: str
    value: str
    told: str
    chance: float


def _asked(question: str, *told: str) -> list[Message]:
    """What the user told in turn, each acknowledged, and then the question."""
    messages = []
    for number, text in enumerate(told):
        messages += [Message.user(text), Message.assistant("Noted." if number % 2 else ACKNOWLEDGED)]
    return [*messages, Message.user(question)]


def _notebook(rng: Random, tokens: int, chat: ChatFormat, first: tuple[Fact, ...], taken: Taken) -> str:
    """About `tokens` tokens of text that begins with the facts `first`: half facts, half filler."""
    sentences = [fact.statement() for fact in first]
    used = sum(len(chat.tokenizer.encode(sentence)) for sentence in sentences)
    others = 0
    while used < tokens:
        if others < MOST_FACTS and rng.random() < 0.5:
            sentence = facts.told(rng, facts.random_fact(rng, taken))
            others += 1
        else:
            sentence = facts.filler(rng)
        sentences.append(sentence)
        used += len(chat.tokenizer.encode(" " + sentence))
    return " ".join(sentences)


def _changed(rng: Random, fact: Fact) -> Fact:
    return fact.with_value(facts.random_value(rng, fact.attribute, fact.entity, unlike=fact.value))


def _recall(rng: Random, distance: int, chat: ChatFormat) -> _Draft:
    taken: Taken = set()
    fact = facts.random_fact(rng, taken)
    text = _notebook(rng, max(distance - 55, 1), chat, (fact,), taken)
    messages = _asked(facts.question(None, *fact.key), text)
    return _Draft(messages, fact.answer(), fact.value, fact.statement(), facts.chance(fact.attribute))


def _corrected(rng: Random, distance: int, chat: ChatFormat) -> _Draft:
    taken: Taken = set()
    fact = facts.random_fact(rng, taken)
    new = _changed(rng, fact)
    text = _notebook(rng, max(distance - 100, 1), chat, (fact,), taken)
    messages = _asked(facts.question(None, *fact.key), text, facts.corrected(None, new))
    return _Draft(messages, new.answer(), new.value, fact.statement(), facts.chance(fact.attribute))


def _correction_kept(rng: Random, distance: int, chat: ChatFormat) -> _Draft:
    taken: Taken = set()
    fact = facts.random_fact(rng, taken)
    new = _changed(rng, fact)
    rest = _notebook(rng, max(distance - 120, 1), chat, (), taken)
    told = facts.corrected(None, new)
    messages = _asked(facts.question(None, *fact.key), fact.statement(), told, *([rest] if rest else []))
    return _Draft(messages, new.answer(), new.value, told, facts.chance(fact.attribute))


def _untouched(rng: Random, distance: int, chat: ChatFormat) -> _Draft:
    taken: Taken = set()
    fact, other = facts.random_fact(rng, taken), facts.random_fact(rng, taken)
    new = _changed(rng, other)
    text = _notebook(rng, max(distance - 100, 1), chat, (fact, other), taken)
    messages = _asked(facts.question(None, *fact.key), text, facts.corrected(None, new))
    return _Draft(messages, fact.answer(), fact.value, fact.statement(), facts.chance(fact.attribute))


def _absent(rng: Random, distance: int, chat: ChatFormat) -> _Draft:
    taken: Taken = set()
    fact = facts.random_fact(rng, taken)
    text = _notebook(rng, max(distance - 55, 1), chat, (fact,), taken)
    key = facts.neighbour_key(rng, [fact], taken)
    messages = _asked(facts.question(None, *key), text)
    # Whoever has read only the question of a case of this task may always say so, and be right.
    return _Draft(messages, facts.NOT_KNOWN, facts.NOT_KNOWN, fact.statement(), 1.0)


def _count(rng: Random, distance: int, chat: ChatFormat) -> _Draft:
    taken: Taken = set()
    fact = facts.random_fact(rng, taken, "list")
    text = _notebook(rng, max(distance - 55, 1), chat, (fact,), taken)
    answer = facts.count_answer(fact)
    value = answer.split(" has ")[1].rstrip(".")
    messages = _asked(facts.count_question(None, fact.entity), text)
    return _Draft(messages, answer, value, fact.statement(), facts.LIKELIEST_COUNT)


TASKS: dict[str, Callable[[Random, int, ChatFormat], _Draft]] = {
    "recall": _recall,
    "corrected": _corrected,
    "correction_kept": _correction_kept,
    "untouched": _untouched,
    "absent": _absent,
    "count": _count,
}
"""recall: a fact at the start of a notebook is asked in the next turn. corrected: after the notebook a turn of its own
corrects it. correction_kept: fact and correction stand at the start, before the long notebook. untouched: another fact
was corrected. absent: the notebook doesn't say. count: how many things are on a list."""


def cases(task: str, distance_tokens: int, count: int, chat: ChatFormat, *, seed: int = 1) -> list[Case]:
    """`count` held-out cases of one of `TASKS` whose fact lies about `distance_tokens` before the answer."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; it must be one of {', '.join(TASKS)}")
    first = HELD_OUT + seed * 1_000_000_000 + list(TASKS).index(task) * 10_000_000 + distance_tokens * 1_000
    return [_encoded(task, TASKS[task](Random(first + i), distance_tokens, chat), chat) for i in range(count)]


def _encoded(task: str, draft: _Draft, chat: ChatFormat) -> Case:
    prompt = _ids(draft.messages, chat, answering=True)
    at, holder = next((at, one) for at, one in enumerate(draft.messages) if draft.told in one.text)
    cut = holder.text.index(draft.told) + len(draft.told)
    told = _ids([*draft.messages[:at], Message.user(holder.text[:cut])], chat)
    # A message ends with four tokens of markup: <|close|>, message, <|sep|>, <|end_of_msg|>.
    position = len(told) - 4
    after = draft.answer.index(" is ") + 4 if " is " in draft.answer else 0
    return Case(
        task=task,
        prompt=np.array(prompt, np.int32),
        memory_tokens=len(_ids(draft.messages[:-1], chat)),
        distance_tokens=len(prompt) - position,
        answer=draft.answer,
        value=draft.value,
        value_start=draft.answer.index(draft.value, after),
        chance=draft.chance,
    )


def _ids(messages: list[Message], chat: ChatFormat, *, answering: bool = False) -> list[int]:
    """Without thinking: a prompt to answer ends with an open `response` channel."""
    rendered = render(chat.markup, messages, PromptOptions(thinking=False), add_generation_prompt=answering)
    return chat.encode(rendered.segments)
