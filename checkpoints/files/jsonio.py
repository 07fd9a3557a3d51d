"""JSON that comes from a disk: decoded strictly, every field checked, every surprise a `SnapshotCorrupt`."""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from serai.checkpoints.errors import SnapshotCorrupt

Json = dict[str, Any]
T = TypeVar("T")


def encode(value: Mapping[str, Any]) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8, no NaN or infinity (ValueError)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def decode(body: bytes, what: str) -> Json:
    """The object in `body`; anything else than one JSON object is `SnapshotCorrupt`."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise SnapshotCorrupt(what=what, problem=f"its text is no JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise SnapshotCorrupt(what=what, problem="its text is no JSON object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def field(value: Mapping[str, Any], name: str, kind: type[T], what: str) -> T:
    """`value[name]`, which must be a `kind` (a bool is no int, an int serves as a float)."""
    found = value.get(name)
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        found = float(found) if abs(found) < 2**63 else None
    if isinstance(found, float) and not math.isfinite(found):  # "1e999" is JSON, and reads as infinity
        found = None
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise SnapshotCorrupt(what=what, problem=f"its field {name!r} is missing or no {kind.__name__}")
    return found


def count(value: Mapping[str, Any], name: str, what: str) -> int:
    """`value[name]` as a number of things: an int from 0 to 2^53."""
    number = field(value, name, int, what)
    if not 0 <= number <= 2**53:
        raise SnapshotCorrupt(what=what, problem=f"its field {name!r} is {number}")
    return number


def counts(value: Mapping[str, Any], name: str, length: int, what: str) -> tuple[int, ...]:
    """`value[name]` as a list of exactly `length` counts."""
    found = field(value, name, list, what)
    if len(found) != length or not all(type(item) is int and 0 <= item <= 2**53 for item in found):
        raise SnapshotCorrupt(what=what, problem=f"its field {name!r} is no list of {length} counts")
    return tuple(found)


def optional_text(value: Mapping[str, Any], name: str, what: str) -> str | None:
    """`value[name]` as text or null; the field itself must be there."""
    if name in value and value[name] is None:
        return None
    return field(value, name, str, what)
