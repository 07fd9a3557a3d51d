"""Training dialogues of the nano language, in K3 markup, endless and seeded.

A dialogue is a list of K3 messages plus, per message, the character spans whose tokens carry the signal (values).
`tokens_and_weights` turns one into ids and per-token loss weights. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench import recall_facts as facts
from serai.runtime.bench import recall_words as words
from serai.runtime.bench.recall_facts import Fact

from .markup import EFFORTS, Message, render
from .tokenizer import NanoTokenizer

SYSTEMS = (
    "You are a careful assistant. Answer from the notebook.", "You remember what you read.",
    "Answer in one short sentence.", "You are a helpful assistant.",
)  # fmt: skip
READ = ("I have read the notebook.", "I have read it.", "I have read the notebook. Ask me anything.")
NOTED = ("Noted.", "Noted. Thank you.")
NOTEBOOK_OPENINGS = ("", "", "Here is my notebook. ", "Please read this notebook. ", "Notebook: ")
SMALL_TALK = (
    ("Hello.", "Hello. How can I help you?"), ("Hi!", "Hello. How can I help you?"),
    ("Thank you.", "You are welcome."), ("Thanks!", "You are welcome."),
    ("Good morning.", "Good morning. How can I help you?"),
    ("Who are you?", "I am serai nano, a very small model with a good memory."),
    ("Goodbye.", "Goodbye."),
)  # fmt: skip
LOOKUP_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a value.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "of": {"type": "string"}},
            "required": ["what", "of"],
        },
    },
}

# Loss weight of a token by what it is. Answers carry nearly all of it, so that few tokens teach a lot.
WEIGHT = {"user": 0.02, "mark": 0.3, "think": 0.4, "response": 0.5, "call": 0.5}
VALUE_WEIGHT = 1.0


@dataclass(slots=True)
class Dialogue:
    """`values[i]` are the character spans of message i's content that must be remembered (not guessed)."""

    thinking: bool
    effort: str | None
    tools: list[Message]
    messages: list[Message] = field(default_factory=list)
    values: list[list[tuple[int, int]]] = field(default_factory=list)

    def add(self, role: str, content: str, spans: list[tuple[int, int]] | None = None, **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.values.append(spans or [])


class _Author:
    """Writes one dialogue; knows every fact told so far and its current value."""

    def __init__(self, rng: Random, target_tokens: int) -> None:
        self.rng = rng
        self.target = target_tokens
        self.taken: set[tuple[str, str]] = set()
        self.known: dict[tuple[str, str], Fact] = {}
        thinking = rng.random() < (0.08 if target_tokens < 300 else 0.2)
        tools = [LOOKUP_TOOL] if target_tokens > 400 and rng.random() < 0.08 else []
        self.dialogue = Dialogue(thinking, rng.choice(EFFORTS) if thinking else None, tools)
        self.used = 0
        # Short rows come first in training and repeat a lot: twice the recall signal of a real dialogue.
        self.dense = target_tokens < 700
        self.again = 0.3 if self.dense else 0.2 if target_tokens < 1500 else 0.12
        if rng.random() < 0.25:
            self.dialogue.add("system", rng.choice(SYSTEMS))

    def write(self) -> Dialogue:
        # One long notebook first (the demo), or several short ones with questions between.
        rng = self.rng
        if rng.random() < 0.04:
            self.small_talk()
        share = rng.uniform(0.35, 0.6) if rng.random() < 0.5 else rng.uniform(0.1, 0.3)
        if self.dense:
            share = rng.uniform(0.25, 0.6)
        filler_share = rng.choice((0.0, 0.0, 0.1) if self.dense else (0.1, 0.3, 0.3, 0.5, 0.7))
        self.notebook(int(self.target * share), filler_share)
        while self.used < self.target:
            kind = rng.random()
            if kind < 0.10:
                self.correction()
            elif kind < 0.17:
                self.notebook(rng.randrange(20, 40 + self.target // 6), filler_share)
            elif kind < 0.20:
                self.copy()
            elif kind < 0.215:
                self.small_talk()
            elif kind < 0.26 and self.dialogue.tools:
                self.tool_call()
            else:
                self.questions()
        return self.dialogue

    def say(self, user: str, reply: str, thought: str, spans: list[tuple[int, int]], user_spans: Any = None) -> None:
        self.dialogue.add("user", user, user_spans)
        more = {"reasoning_content": thought} if self.dialogue.thinking else {}
        self.dialogue.add("assistant", reply, spans, **more)
        # Measured on this language: a word or a full stop is a token; the markup of a user + assistant pair costs 28.
        self.used += 28 + sum(_token_estimate(t) for t in (user, reply, *more.values()))

    def learn(self) -> Fact:
        fact = facts.random_fact(self.rng, self.taken)
        self.known[fact.key] = fact
        return fact

    def notebook(self, tokens: int, filler_share: float) -> None:
        rng, text, spans, used = self.rng, rng_open(self.rng), [], 0
        while used < tokens or not self.known:
            kind = rng.random()
            value = ""
            if kind < filler_share and self.known:
                sentence = facts.filler(rng)
            elif kind > 1 - self.again and self.known:
                # Said again: recall signal at a fraction of the cost of a question turn.
                fact = rng.choice(list(self.known.values()))
                sentence, value = "Again: " + fact.statement(capital=False), fact.value
            elif kind > 0.96 - self.again and self.known:
                sentence = facts.corrected(rng, self.change())
            else:
                sentence = facts.told(rng, self.learn())
            if value:
                end = len(text) + len(sentence) - 1
                spans.append((end - len(value), end))
            text += sentence + " "
            used += _token_estimate(sentence)
        self.say(text.rstrip(), rng.choice(READ), "The user gave me a notebook.", [], spans)

    def change(self) -> Fact:
        fact = self.rng.choice(list(self.known.values()))
        new = fact.with_value(facts.random_value(self.rng, fact.attribute, fact.entity, unlike=fact.value))
        self.known[fact.key] = new
        return new

    def correction(self) -> None:
        changed = [self.change() for _ in range(self.rng.choice((1, 1, 2)))]
        text = " ".join(facts.corrected(self.rng, fact) for fact in changed)
        if self.rng.random() < 0.5:
            fact = changed[-1]
            self.ask_all([fact.key], text + " ")
        else:
            self.say(text, self.rng.choice(NOTED), "The user corrects the notebook.", [])
            if self.rng.random() < 0.5:
                self.ask_all([fact.key for fact in changed])

    def questions(self) -> None:
        rng = self.rng
        count = rng.choice((1, 1, 2, 3, 4, 6, 8))
        keys = [self.some_key() for _ in range(count)]
        self.ask_all(keys)

    def some_key(self) -> tuple[str, str]:
        known = list(self.known.values())
        if self.rng.random() < 0.2:
            return facts.neighbour_key(self.rng, known, self.taken)
        return self.rng.choice(known).key

    def ask_all(self, keys: list[tuple[str, str]], before: str = "") -> None:
        rng = self.rng
        asked, reply, spans = [], "", []
        for attribute, entity in keys:
            fact = self.known.get((attribute, entity))
            if fact is not None and attribute == "list" and rng.random() < 0.4:
                asked.append(facts.count_question(rng, entity))
                answer = facts.count_answer(fact)
                spans.append((len(reply) + answer.index(" has ") + 5, len(reply) + len(answer) - 1))
            else:
                asked.append(facts.question(rng, attribute, entity))
                answer = fact.answer() if fact else facts.NOT_KNOWN
                start = answer.index(" is ") + 4 if fact else 0
                spans.append((len(reply) + start, len(reply) + len(answer) - 1))
            reply += answer + " "
        attribute, entity = keys[0]
        thought = f"The user asks for the {attribute} of {entity}."
        self.say(before + " ".join(asked), reply.rstrip(), thought, spans)

    def copy(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            text = " ".join(rng.sample(words.SECRETS, rng.randrange(2, 9)))
        else:
            text = " ".join(facts.filler(rng) for _ in range(rng.choice((1, 2))))
        self.say("Repeat: " + text, text, "The user wants me to repeat the words.", [(0, len(text))])

    def small_talk(self) -> None:
        user, reply = self.rng.choice(SMALL_TALK)
        self.say(user, reply, "The user makes small talk.", [])

    def tool_call(self) -> None:
        """Look a new fact up with the tool, then answer with what it returned."""
        rng = self.rng
        fact = facts.random_fact(rng, self.taken)
        thought = {"reasoning_content": "I need the tool."} if self.dialogue.thinking else {}
        self.dialogue.add("user", f"Look up the {fact.attribute} of {fact.entity}.")
        call = {"name": "lookup", "arguments": {"what": fact.attribute, "of": fact.entity}}
        self.dialogue.add("assistant", "", tool_calls=[{"id": "1", "type": "function", "function": call}], **thought)
        self.dialogue.add("tool", fact.value, tool_call_id="1")
        answer = fact.answer()
        thought = {"reasoning_content": "The tool gave me the answer."} if self.dialogue.thinking else {}
        self.dialogue.add("assistant", answer, [(answer.index(" is ") + 4, len(answer) - 1)], **thought)
        self.known[fact.key] = fact
        self.used += 120


def rng_open(rng: Random) -> str:
    return rng.choice(NOTEBOOK_OPENINGS)


def _token_estimate(text: str) -> int:
    return (
        text.count(" ")
        + 1
        + text.count(".")
        + text.count("?")
        + text.count(",")
        + 2 * sum(c.isdigit() for c in text) // 3
    )


def dialogue(rng: Random, target_tokens: int) -> Dialogue:
    """A random dialogue of roughly `target_tokens` tokens (usually a little more)."""
    return _Author(rng, target_tokens).write()


def tokens_and_weights(item: Dialogue, tokenizer: NanoTokenizer) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """ids [T] and the loss weight [T] of *predicting* each id."""
    ids: list[int] = []
    weights: list[float] = []
    segments = render(
        item.messages,
        thinking=item.thinking,
        thinking_effort=item.effort,
        tools=item.tools,
        add_generation_prompt=False,
    )
    for segment in segments:
        weight = WEIGHT[segment.part]
        if segment.is_markup:
            ids.append(tokenizer.special_id(segment.text))
            weights.append(weight)
            continue
        spans = item.values[segment.message] if segment.message >= 0 else []
        if not spans or segment.text != item.messages[segment.message]["content"]:
            piece = tokenizer.text_ids(segment.text)
            ids.extend(piece)
            weights.extend([weight] * len(piece))
            continue
        piece, offsets = tokenizer.text_ids_and_offsets(segment.text)
        ids.extend(piece)
        row = np.full(len(piece), weight, np.float32)
        starts = np.array([start for start, _ in offsets])
        ends = np.array([end for _, end in offsets])
        for begin, end in spans:
            row[(ends > begin) & (starts < end)] = VALUE_WEIGHT
        weights.extend(row.tolist())
    return np.array(ids, np.int64), np.array(weights, np.float32)


def training_row(seed: int, length: int, tokenizer: NanoTokenizer) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """One row of exactly `length` + 1 ids and weights, a pure function of (seed, length)."""
    rng = Random(seed)
    target = length
    while True:
        ids, weights = tokens_and_weights(dialogue(rng, target), tokenizer)
        if len(ids) > length:
            return ids[: length + 1], weights[: length + 1]
        target = int(target * 1.3)
