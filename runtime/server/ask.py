"""What is asked of the model, whichever endpoint it came by, and the parts of a request that all of them share."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from serai.runtime.chat import NO_NOTES, ImagePart, Message, Notes, PromptInvalid, ToolCall, read_tools
from serai.runtime.chat.conversation import runs
from serai.runtime.errors import BadParameter
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.server.errors import invalid
from serai.runtime.server.fields import Fields, strings
from serai.runtime.server.held import Choice, read_choice
from serai.runtime.sessions.deadline import Deadline

MAX_CHOICES = 32
SEED_MASK = 2**64 - 1
LARGEST = 2**63 - 1
FREE = Choice()

EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}
"""OpenAI's words for effort as the model's own three (it knows no medium); "none" turns thinking off."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a conversation declares once: it stands before the first message and can't be changed later.

    `instructions` are those last given, by which a later request's are known to be new; they are read as a message.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool | None = None
    effort: str | None = None
    instructions: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "tools": [dict(tool) for tool in self.tools],
            "thinking": self.thinking,
            "effort": self.effort,
            "instructions": self.instructions,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Setting":
        return cls(tuple(data["tools"]), data["thinking"], data["effort"], data["instructions"])


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    `previous` is the place to go on from; without one and if `matched`, the deepest known place that `messages` begin
    with is looked for. `params` are without `stop` and with the largest `max_tokens` when none was given
    (`max_tokens` is None then). `stops` end the content only, never the reasoning. `choice` says what is held of calls.
    `store` says whether the reply can be gone on from after this process. All of it must be done by the `deadline`.
    `origins` says for each message where in the client's request it stood; empty where they are its list of messages.
    """

    namespace: str
    messages: tuple[Message, ...]
    setting: Setting
    params: SamplingParams
    max_tokens: int | None
    previous: str | None = None
    matched: bool = True
    notes: Notes = NO_NOTES
    stops: tuple[str, ...] = ()
    choices: int = 1
    store: bool = True
    choice: Choice = FREE
    label: str = ""
    priority: int = 0
    deadline: Deadline | None = None
    origins: tuple[str, ...] = ()

    @contextmanager
    def naming(self, start: int) -> Iterator[None]:
        """What is raised of one of the messages from `start` on is told of the place the client knows it by."""
        try:
            yield
        except PromptInvalid as error:
            if error.message_index is None:
                raise
            index = start + error.message_index
            what = str(error).removeprefix(f"message {error.message_index}: ")
            if not self.origins:
                raise PromptInvalid(what, message_index=index) from None
            raise invalid(self.origins[index], f"{self.origins[index]}: {what}") from None

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """All that the conversation has declared, in its setting or in messages since."""
        known = list(self.setting.tools)
        for message in self.messages:
            known += [tool for tool in message.tools if tool not in known]
        return tuple(known)


def read_params(fields: Fields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Sampling as OpenAI and vLLM name it. Every bad value is a 400 that names the field."""
    seed = fields.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise fields.wrong("seed", "an integer")
    biases = fields.object("logit_bias")
    try:
        return SamplingParams(
            max_tokens=LARGEST if max_tokens is None else max_tokens,
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=max(fields.integer("top_k", -1, LARGEST) or 0, 0),
            min_p=fields.number("min_p", 0.0),
            repetition_penalty=fields.number("repetition_penalty", 1.0),
            presence_penalty=fields.number("presence_penalty", 0.0),
            frequency_penalty=fields.number("frequency_penalty", 0.0),
            logit_bias={} if biases is None else _biases(biases),
            seed=None if seed is None else seed & SEED_MASK,
            min_tokens=fields.integer("min_tokens", 0, LARGEST) or 0,
            ignore_eos=fields.flag("ignore_eos", False),
            logprobs=logprobs,
        )
    except BadParameter as error:
        raise invalid(next((name for name in fields.values if name in str(error)), None), str(error)) from None


def read_stops(fields: Fields, name: str = "stop") -> tuple[str, ...]:
    stops = tuple(strings(fields, name))
    try:
        SamplingParams(stop=stops)
    except BadParameter as error:
        raise invalid(name, str(error)) from None
    return stops


def _biases(fields: Fields) -> dict[int, float]:
    try:
        return {int(token): fields.number(token, 0.0) for token in fields.values}
    except ValueError:
        raise invalid("logit_bias", "logit_bias must map token ids to numbers") from None


def read_effort(effort: str | None, param: str) -> tuple[bool | None, str | None]:
    """Whether to think and how hard; None leaves it to the model's family."""
    if effort is None:
        return None, None
    if effort == "none":
        return False, None
    if effort not in EFFORTS:
        raise invalid(param, f"{param} is {effort!r:.60}; it must be none, {', '.join(EFFORTS)}")
    return None, EFFORTS[effort]


def read_declared_tools(items: Sequence[Mapping[str, Any]], param: str) -> tuple[Mapping[str, Any], ...]:
    """Function tools in the shape the models were trained on; of other kinds there are none here."""
    tools = []
    for place, item in enumerate(items):
        at = f"{param}[{place}]"
        if item.get("type") != "function":
            raise invalid(f"{at}.type", f"{at} is of type {item.get('type')!r:.60}; only functions can be called here")
        function = item.get("function", {key: item[key] for key in item if key not in ("type", "strict")})
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(at, f"{at} has no function name")
        kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
        tools.append({"type": "function", "function": kept})
    return read_tools(tools)


def read_tool_choice(fields: Fields) -> Choice:
    """What is said of calls: `tool_choice`, `parallel_tool_calls`, and `strict` with any of the tools."""
    strict = any((tool.get("function") or tool).get("strict") is True for tool in fields.objects("tools"))
    return read_choice(fields.get("tool_choice"), parallel=fields.flag("parallel_tool_calls", True), strict=strict)


def with_format(notes: Notes, response_format: Fields | None) -> Notes:
    """The notes with what `response_format` (in chat's shape) asks for; plain text asks for nothing."""
    if response_format is None or response_format.get("type") == "text":
        return notes
    return replace(notes, response_format=response_format.values)


def chain_start(setting: Setting) -> str:
    """The semantic hash of a conversation before its first message."""
    return _digest("", replace(setting, instructions=None).to_json())


def chains(start: str, messages: Sequence[Message]) -> list[str]:
    """The semantic hash after each message: what a client means, whatever it dropped or spelled anew on the way.

    Reasoning doesn't count, nor spaces around what the assistant said, nor how arguments were written as JSON. An
    assistant's turn that came as two messages has the hash after the second; the first has none ("").
    """
    result = [""] * len(messages)
    last = start
    for run in runs(messages):
        joined = run.messages[0] is not messages[run.index]
        for place, message in enumerate(run.messages, run.index + joined):
            last = result[place] = _digest(last, _meaning(message))
    return result


def chain_after(before: str, message: Message) -> str:
    """The semantic hash after one more message."""
    return _digest(before, _meaning(message))


def _meaning(message: Message) -> list[Any]:
    text = "".join(part.source if isinstance(part, ImagePart) else part.text for part in message.parts)
    if message.role == "assistant":
        text = text.strip()
    calls = [[call.name, _arguments(call), call.id] for call in message.calls]
    # A tool's answer is known by the call it answers; clients differ in whether they name the tool as well.
    name = None if message.call_id is not None else message.name
    return [message.role, name, text, calls, message.call_id, [dict(tool) for tool in message.tools]]


def _arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments


def _digest(before: str, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return blake3(before.encode()).update(text.encode("utf-8", "surrogatepass")).hexdigest(32)
