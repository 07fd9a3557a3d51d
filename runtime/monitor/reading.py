"""A `Status` from its JSON, which comes from another process: checked field by field.

Fields this version doesn't know are ignored; missing or wrong ones are named. `from_json(Status.to_json())` is the same
status again.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from serai.runtime.errors import SeraiError
from serai.runtime.memory.attention import AttentionCost
from serai.runtime.monitor.detail import NodeStatus, SessionDetail
from serai.runtime.monitor.source import About
from serai.runtime.monitor.transcript import Passage, Voice
from serai.runtime.sessions.events import EventKind, SessionEvent
from serai.runtime.status import (
    BudgetStatus,
    ExpertStatus,
    LayerHeat,
    NamespaceStatus,
    SessionStatus,
    Status,
    WorkStatus,
)

T = TypeVar("T")

MOST = 2**63
"""Numbers from here on are nobody's bytes, and too large to compute with."""


class StatusUnreadable(SeraiError):
    """What was received is no status; the sentence names the field."""

    def __init__(self, *, where: str, expected: str, found: object) -> None:
        super().__init__(f"{where} must be {expected}, not {repr(found)[:60]}")


def status_from_json(value: object) -> Status:
    """Raises `StatusUnreadable`."""
    body = _object(value, "a status")
    experts = body.get("experts")
    return Status(
        model=_field(body, "model", str, ""),
        precision=_field(body, "precision", str, ""),
        now_s=_field(body, "now_s", float, ""),
        budget=_plain(BudgetStatus, body.get("budget"), "budget"),
        work=_plain(WorkStatus, body.get("work"), "work"),
        experts=None if experts is None else _experts(experts),
        store_bytes=_field(body, "store_bytes", int | None, ""),
        sessions=_list(SessionStatus, body.get("sessions"), "sessions"),
        namespaces=_list(NamespaceStatus, body.get("namespaces", ()), "namespaces"),
    )


def event_from_json(value: object) -> SessionEvent | None:
    """None for a kind of event that this version doesn't know; raises `StatusUnreadable`."""
    body = _object(value, "an event")
    kind = _field(body, "kind", str, "event")
    if kind not in {known.value for known in EventKind}:
        return None
    return SessionEvent(
        EventKind(kind),
        _field(body, "session_id", str, "event"),
        _field(body, "time_s", float, "event"),
        _field(body, "detail", str, "event"),
        _field(body, "missed", int, "event"),
    )


def about_from_json(value: object) -> About:
    """A server that doesn't say who may act lets everybody; raises `StatusUnreadable`."""
    body = _object(value, "a model")
    may_act = _field(body, "may_act", bool, "") if "may_act" in body else True
    return About(_list(AttentionCost, body.get("comparison"), "comparison"), may_act)


def detail_from_json(value: object) -> SessionDetail:
    """Raises `StatusUnreadable`."""
    body = _object(value, "a session")
    passages = body.get("passages")
    if not isinstance(passages, list):
        raise StatusUnreadable(where="passages", expected="a list", found=passages)
    return SessionDetail(
        session_id=_field(body, "session_id", str, ""),
        position=_field(body, "position", int, ""),
        passages=tuple(passage_from_json(one) for one in passages),
        nodes=_list(NodeStatus, body.get("nodes"), "nodes"),
        earlier_nodes=_field(body, "earlier_nodes", int, ""),
    )


def passage_from_json(value: object) -> Passage:
    """A voice that this version doesn't know is plain text; raises `StatusUnreadable`."""
    body = _object(value, "a passage")
    name = _field(body, "voice", str, "passage")
    voice = Voice(name) if name in {known.value for known in Voice} else Voice.TEXT
    return Passage(voice, _field(body, "text", str, "passage"), _field(body, "is_cut", bool, "passage"))


def _experts(value: object) -> ExpertStatus:
    body = _object(value, "experts")
    return replace(_plain(ExpertStatus, body, "experts"), layers=_list(LayerHeat, body.get("layers"), "experts.layers"))


def _list(kind: type[T], value: object, where: str) -> tuple[T, ...]:
    if not isinstance(value, list | tuple):
        raise StatusUnreadable(where=where, expected="a list", found=value)
    return tuple(_plain(kind, one, f"{where}[{index}]") for index, one in enumerate(value))


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise StatusUnreadable(where=where, expected="an object", found=value)
    return value


def _plain(kind: type[T], value: object, where: str) -> T:
    """A dataclass of plain fields; lists, which come last and have defaults, are left to the caller."""
    body = _object(value, where)
    return kind(*[_read(body, name, kinds, where) for name, kinds in _kinds(kind)])  # type: ignore[arg-type] # classes hash


@cache
def _kinds(kind: type[Any]) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """A dataclass's fields with the types each may have. A status has thousands, so this is looked up once."""
    hints = get_type_hints(kind)
    plain = [one.name for one in fields(kind) if get_origin(hints[one.name]) is not tuple]
    return tuple((name, _alternatives(hints[name])) for name in plain)


def _alternatives(kind: Any) -> tuple[type, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _field(body: Mapping[str, object], name: str, kind: Any, where: str) -> Any:
    return _read(body, name, _alternatives(kind), where)


def _read(body: Mapping[str, object], name: str, kinds: tuple[type, ...], where: str) -> Any:
    value = body.get(name)
    found = type(value)
    for kind in kinds:
        # JSON has one kind of number, and bool is an int only to Python.
        if kind is float and found in (int, float) and -MOST < value < MOST:  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        if found is not kind:
            continue
        if kind in (str, bool, NoneType) or (kind is int and -MOST < value < MOST):  # type: ignore[operator]
            return value
    expected = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
    raise StatusUnreadable(where=f"{where}.{name}" if where else name, expected=expected, found=value)
