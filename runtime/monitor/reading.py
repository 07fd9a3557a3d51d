"""A `Status` from its JSON, which comes from another process: checked field by field.

Fields this version doesn't know are ignored; missing or wrong ones are named. `from_json(Status.to_json())` is the same
status again.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from serai.runtime.attention_memory import AttentionCost
from serai.runtime.errors import SeraiError
from serai.runtime.events import EventKind, SessionEvent
from serai.runtime.status import BudgetStatus, ExpertStatus, SessionStatus, Status, WorkStatus

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
    sessions = body.get("sessions")
    if not isinstance(sessions, list | tuple):
        raise StatusUnreadable(where="sessions", expected="a list", found=sessions)
    return Status(
        model=_field(body, "model", str, ""),
        precision=_field(body, "precision", str, ""),
        now_s=_field(body, "now_s", float, ""),
        budget=_plain(BudgetStatus, body.get("budget"), "budget"),
        work=_plain(WorkStatus, body.get("work"), "work"),
        experts=None if experts is None else _plain(ExpertStatus, experts, "experts"),
        store_bytes=_field(body, "store_bytes", int | None, ""),
        sessions=tuple(_plain(SessionStatus, one, f"sessions[{index}]") for index, one in enumerate(sessions)),
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


def comparison_from_json(value: object) -> tuple[AttentionCost, ...]:
    """Raises `StatusUnreadable`."""
    costs = _object(value, "a model").get("comparison")
    if not isinstance(costs, list):
        raise StatusUnreadable(where="comparison", expected="a list", found=costs)
    return tuple(_plain(AttentionCost, one, f"comparison[{index}]") for index, one in enumerate(costs))


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise StatusUnreadable(where=where, expected="an object", found=value)
    return value


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _plain(kind: type[T], value: object, where: str) -> T:
    """A dataclass of plain fields."""
    hints = _HINTS.setdefault(kind, get_type_hints(kind))
    body = _object(value, where)
    return kind(**{one.name: _field(body, one.name, hints[one.name], where) for one in fields(kind)})  # type: ignore[arg-type]


def _field(body: Mapping[str, object], name: str, kind: Any, where: str) -> Any:
    value = body.get(name)
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    for one in kinds:
        # JSON has one kind of number, and bool is an int only to Python.
        if one is float and type(value) in (int, float) and -MOST < value < MOST:  # type: ignore[operator]
            return float(value)  # type: ignore[arg-type]
        if one is int and type(value) is int and -MOST < value < MOST:
            return value
        if one in (str, bool, NoneType) and type(value) is one:
            return value
    expected = " or ".join("null" if one is NoneType else one.__name__ for one in kinds)
    raise StatusUnreadable(where=f"{where}.{name}" if where else name, expected=expected, found=value)
