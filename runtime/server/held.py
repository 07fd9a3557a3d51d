"""What a request holds its reply to: a JSON schema, a call that must come, calls that may not.

It is held by a grammar over the whole reply, so the model can write nothing else. A request that asks for nothing of
the kind has none, and pays nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serai.runtime.chat import NO_NOTES, ChatFormat, Cursor, Held, Notes
from serai.runtime.chat.grammars import MOST_CALLS
from serai.runtime.errors import BadParameter
from serai.runtime.sampling.grammar import Grammar, Grammars
from serai.runtime.server.errors import invalid
from serai.runtime.server.fields import kind_of


@dataclass(frozen=True, slots=True)
class Choice:
    """What was said about calls: the note for the model, and what is held.

    `names` are the functions that may be called (None: all that are declared), `strict` says that arguments must be
    what the functions' schemas say also where the model may choose to call or not.
    """

    notes: Notes = NO_NOTES
    names: tuple[str, ...] | None = None
    least_calls: int = 0
    most_calls: int = MOST_CALLS
    strict: bool = False
    param: str = "tool_choice"

    @property
    def is_free(self) -> bool:
        """Whether nothing needs holding."""
        return self.names is None and not self.strict and (self.least_calls, self.most_calls) == (0, MOST_CALLS)


def read_choice(value: object, *, parallel: bool, strict: bool, param: str = "tool_choice") -> Choice:
    """`tool_choice` in chat's shape or that of responses."""
    most = MOST_CALLS if parallel else 1
    free = Choice(most_calls=most, strict=strict, param=param)
    match value:
        case None | "auto":
            return free
        case "none":
            return replace(free, notes=Notes(tool_choice="none"), most_calls=0)
        case "required":
            return replace(free, notes=Notes(tool_choice="required"), least_calls=1)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return replace(free, names=(name,), least_calls=1, most_calls=1)
        case {"type": "allowed_tools"} if isinstance(value, Mapping):
            return _among(free, value)
        case _:
            shown = repr(value)[:60] if isinstance(value, str) else kind_of(value)
            raise invalid(param, f"{param} must be auto, none, required or name functions, and is {shown}")


def _among(free: Choice, value: Mapping[Any, Any]) -> Choice:
    """`allowed_tools`: in chat's shape what it says is one level further in."""
    inner = value.get("allowed_tools")
    allowed = inner if isinstance(inner, Mapping) else value
    names: list[str] = []
    given = allowed.get("tools")
    for tool in given if isinstance(given, list) else []:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
                names.append(name)
            case _:
                raise invalid(f"{free.param}.tools", f"{free.param}.tools must name functions, and has {tool!r:.60}")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required") or not names:
        raise invalid(f"{free.param}.mode", f"{free.param} needs a mode (auto or required) and at least one tool")
    return replace(free, names=tuple(dict.fromkeys(names)), least_calls=int(mode == "required"))


def held(choice: Choice, notes: Notes, tools: Sequence[Mapping[str, Any]]) -> Held | None:
    """What the reply is held to, given all tools the conversation declares; None for nothing. Raises a 400 for a
    function that isn't declared."""
    kind = (notes.response_format or {}).get("type")
    schema: Mapping[str, Any] | None = notes.schema if kind == "json_schema" else None
    if kind == "json_object":
        schema = {"type": "object"}
    names = [tool["function"]["name"] for tool in tools]
    if choice.least_calls and not names:
        raise invalid(choice.param, f"{choice.param} asks for a call, but no tools are declared to choose from")
    for name in choice.names or ():
        if name not in names:
            raise invalid(choice.param, f"{choice.param} names {name!r:.80}, but the tools are {', '.join(names)}")
    if schema is None and (choice.is_free or (not names and choice.most_calls)):
        return None
    allowed = tuple(tool for tool in tools if choice.names is None or tool["function"]["name"] in choice.names)
    return Held(schema, allowed, choice.least_calls, choice.most_calls)


def compiled(grammars: Grammars, form: ChatFormat, prompted: Cursor, wanted: Held, *, strict: bool) -> Grammar:
    """The grammar of the reply that begins at `prompted`. Raises a 400 for a schema that can't be held.

    Functions that are not `strict` promise no more than to be called with an object: where a schema of theirs can't
    be held, their arguments are any object.
    """
    try:
        return grammars.compile(_rules(form, prompted, wanted))
    except BadParameter as error:
        if wanted.may_call and not strict:
            loose = replace(wanted, tools=tuple(map(_loose, wanted.tools)))
            return compiled(grammars, form, prompted, loose, strict=True)
        param = "tools" if wanted.schema is None else "response_format"
        raise invalid(param, f"{param}: {error}") from None


def _rules(form: ChatFormat, prompted: Cursor, wanted: Held) -> str:
    try:
        return form.grammar(prompted, wanted)
    except RecursionError:
        raise BadParameter("the schema nests too deep to be held; a flatter one could be") from None


def _loose(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "parameters": {}}}
