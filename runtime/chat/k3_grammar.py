"""Grammars of Kimi K3's replies.

    reply = [thought] answer [tools], then the end of the message
    call  = the element `call` with one `argument` a member, whose text is the string itself or the value as JSON

An argument's `type` says how its text is read, so a member that may be of several types is a choice of elements. Where
the arguments are described by more than the types of their members (`anyOf`, a `pattern`), the call holds one element
`json` with the whole object, as the renderer writes arguments that are no object.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from serai.runtime.chat.grammars import TEXT, Held, as_object, function_of, run_of_calls, spelled
from serai.runtime.chat.k3_tags import END_OF_MESSAGE, K3Writer, json_type
from serai.runtime.chat.segments import Segment, Tokenizer
from serai.runtime.sampling.grammar import json_rule

if TYPE_CHECKING:
    from serai.runtime.chat.conversation import Cursor

_SILENT = ("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "strict")
"""Keywords that allow and forbid nothing."""

_OF_OBJECTS = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
_OF_STRINGS = ("type", "minLength", "maxLength")
_JSON_TYPES = {
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
    "array": "array",
    "object": "object",
}
"""JSON Schema's types as the markup names them; a string is not written as JSON."""

_NAME = r'/[^"&<>\x00-\x1f]{1,64}/'
"""A member's name where the schema names none: it needs no escapes."""

_MOST_FREE = 32
"""Members of a call whose schema names none."""

_LONGEST_BOUNDED = 4096
"""A string whose length is bounded takes states of the lexer for each character: longer bounds are held as JSON."""


def k3_grammar(cursor: "Cursor", held: Held, tokenizer: Tokenizer) -> str:
    """The grammar of a reply that begins at `cursor`."""
    parts = _Parts(tokenizer)
    end = parts.close("message") + " " + spelled([Segment(END_OF_MESSAGE, markup=True)], tokenizer)
    answer = "TEXT" if held.schema is None else "said"
    rules = [TEXT]
    if held.schema is not None:
        rules.append(f"said: {json_rule(held.schema)}")
    answered = f"{answer} {parts.close('response')}"
    start = f"{answered} end"
    if held.may_call:
        section = f"{parts.open('tools')} calls {parts.close('tools')}"
        silent = f"{parts.close('response')} {section} end"
        if held.least_calls:
            start = silent
        elif held.schema is None:
            start = f"{answered} [{section}] end"
        else:
            start = f"{start} | {silent}"
        rules.append(f"calls: {run_of_calls(held.least_calls, held.most_calls)}")
        rules += _calls(held, parts)
    if cursor.reply == "think":
        start = f"TEXT {parts.close('think')} {parts.open('response')} ({start})"
    return "\n".join([f"start: {start}", f"end: {end}", *rules]) + "\n"


class _Parts:
    """Tags as rules."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def open(self, name: str, /, **attributes: str) -> str:
        out = K3Writer()
        out.open(name, **attributes)
        return spelled(out.finish(), self.tokenizer)

    def close(self, name: str) -> str:
        out = K3Writer()
        out.close(name)
        return spelled(out.finish(), self.tokenizer)

    def any_argument(self, type_: str, body: str) -> str:
        """An argument of any name."""
        out = K3Writer()
        out.open("argument", key="?", type=type_)
        tag = out.finish()
        name = next(place for place, segment in enumerate(tag) if segment.text == "?")
        before, after = spelled(tag[:name], self.tokenizer), spelled(tag[name + 1 :], self.tokenizer)
        return f"{before} {_NAME} {after} {body} {self.close('argument')}"

    def element(self, name: str, body: str, /, **attributes: str) -> str:
        return f"{self.open(name, **attributes)} {body} {self.close(name)}"


def _calls(held: Held, parts: _Parts) -> Iterator[str]:
    functions = [function_of(tool) for tool in held.tools]
    for place, (_, parameters) in enumerate(functions):
        yield from _arguments(f"arguments_{place}", parameters, parts)
    for number in range(1, held.most_calls + 1):
        bodies = [
            f"{parts.open('call', tool=name, index=str(number))} arguments_{place}"
            for place, (name, _) in enumerate(functions)
        ]
        yield f"call_{number}: ({' | '.join(bodies)}) {parts.close('call')}"


def _arguments(rule: str, parameters: Mapping[str, Any], parts: _Parts) -> Iterator[str]:
    """The rules of one function's arguments, the first of them named `rule`."""
    if _is_free(parameters):
        yield f"{rule}: {rule}_any{{0,{_MOST_FREE}}}"
        yield f"{rule}_any: {' | '.join(parts.any_argument(type_, body) for type_, body in _choices({}, {}) or ())}"
        return
    members = _members(parameters, parts)
    if members is None:
        yield f"{rule}: {parts.element('json', f'{rule}_json', type='object')}"
        yield f"{rule}_json: {json_rule(as_object(parameters))}"
        return
    required = parameters.get("required", ())
    names = [f"{rule}_{place}" if key in required else f"[{rule}_{place}]" for place, key in enumerate(members)]
    yield f"{rule}: " + (" ".join(names) or '""')
    for place, choices in enumerate(members.values()):
        yield f"{rule}_{place}: {' | '.join(choices)}"


def _is_free(parameters: Mapping[str, Any]) -> bool:
    """Whether the arguments may be any members at all."""
    said = [key for key in parameters if key not in _SILENT and not (key in _OF_OBJECTS and not parameters[key])]
    return all(key in ("type", "additionalProperties") for key in said) and (
        parameters.get("type", "object") == "object" and parameters.get("additionalProperties", True) is True
    )


def _members(parameters: Mapping[str, Any], parts: _Parts) -> dict[str, list[str]] | None:
    """By key the elements that may give it; None if the schema says more than the types of declared members."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if any(key not in _OF_OBJECTS and key not in _SILENT for key in parameters):
        return None
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    if not all(isinstance(key, str) and key in properties for key in required):
        return None
    if parameters.get("type", "object") != "object" or not _only_definitions(parameters):
        return None
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    members: dict[str, list[str]] = {}
    for key, schema in properties.items():
        choices = _choices(schema, shared)
        if choices is None:
            return None
        members[key] = [parts.element("argument", body, key=key, type=type_) for type_, body in choices]
    return members


def _choices(schema: Any, shared: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """The types a member may have, each with the rule of its text; None if they can't be told apart like that."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        return None
    said = {key: value for key, value in schema.items() if key not in _SILENT}
    if "enum" in said or "const" in said:
        return _listed(said)
    if "anyOf" in said:
        if len(said) > 1 or not isinstance(said["anyOf"], list):
            return None
        each = [_choices(inner, shared) for inner in said["anyOf"]]
        return None if None in each else [choice for choices in each for choice in choices or ()] or None
    if "$ref" in said:
        target = _target(said["$ref"], shared) if len(said) == 1 else None
        return None if target is None else _choices(target, shared)
    if said and "type" not in said:
        return None
    types = said.get("type", ["string", "number", "boolean", "null", "array", "object"])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list):
        return None
    choices: list[tuple[str, str]] = []
    for type_ in types:
        if type_ == "string":
            text = _text(said, alone=len(types) == 1)
            if text is None:
                return None
            choices.append(("string", text))
        elif isinstance(type_, str) and type_ in _JSON_TYPES:
            choices.append((_JSON_TYPES[type_], json_rule({**shared, **said, "type": type_})))
        else:
            return None
    return choices or None


def _target(reference: object, shared: Mapping[str, Any]) -> Any:
    """What a reference within the parameters names, unless that may be a reference again (they may be in a circle)."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    kind, _, name = reference.removeprefix("#/").partition("/")
    among = shared.get(kind)
    target = among.get(name) if isinstance(among, Mapping) else None
    again = isinstance(target, Mapping) and ("$ref" in target or any(_references(target.get("anyOf"))))
    return None if again else target


def _references(schema: Any) -> Iterator[object]:
    """Every `$ref` within a schema."""
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "$ref":
                yield value
            else:
                yield from _references(value)


def _only_definitions(schema: Mapping[str, Any]) -> bool:
    """Whether a member's schema means the same alone, with the definitions beside it: there `#` would be the member."""
    return all(isinstance(one, str) and one.startswith(("#/$defs/", "#/definitions/")) for one in _references(schema))


def _text(schema: Mapping[str, Any], *, alone: bool) -> str | None:
    """The rule of a string that stands as it is; None if its schema says more than how long it is."""
    if alone and any(key not in _OF_STRINGS for key in schema):
        return None
    if not alone and any(key in schema for key in ("pattern", "format", "minLength", "maxLength")):
        return None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least == 0 and most is None:
        return "TEXT"
    bounds = [bound for bound in (least, most) if bound is not None]
    if not all(type(bound) is int and 0 <= bound <= _LONGEST_BOUNDED for bound in bounds):
        return None
    return f"/(?s:.{{{least},{'' if most is None else most}}})/"


def _listed(schema: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """The values of an `enum`, by type."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if len(schema) > 1 + ("type" in schema) or not isinstance(values, Sequence) or isinstance(values, str):
        return None
    types = schema.get("type")
    if not isinstance(types, str | list | None):
        return None
    values = [value for value in values if types is None or _is_of(value, types)]
    strings = [json.dumps(value) for value in values if isinstance(value, str)]
    choices = [("string", f"({' | '.join(strings)})")] if strings else []
    for type_ in dict.fromkeys(json_type(value) for value in values if not isinstance(value, str)):
        same = [value for value in values if not isinstance(value, str) and json_type(value) == type_]
        choices.append((type_, json_rule({"enum": same})))
    return choices or None


def _is_of(value: Any, types: Any) -> bool:
    types = [types] if isinstance(types, str) else types
    kind = json_type(value)
    return kind in types or (kind == "number" and "integer" in types and isinstance(value, int))
