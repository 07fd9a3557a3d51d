"""Reading JSON from strangers: each field with its type and range, errors naming the field and the value."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from serai.runtime.chat.json_text import json_value
from serai.runtime.server.errors import invalid


def read_object(body: bytes) -> dict[str, Any]:
    """A request's body as a JSON object."""
    try:
        value = json_value(body)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, not {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """What a JSON value is, in a word."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case _:
            return "a list"


class Fields:
    """One JSON object; every getter takes null for absent and gives `default` then."""

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        self.values = values
        self._at = at

    def path(self, name: str) -> str:
        return f"{self._at}.{name}" if self._at else name

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def need_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise invalid(self.path(name), f"{self.path(name)} is required, a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a finite number")
        try:
            number = float(value)
        except OverflowError:  # JSON has integers of any size
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(name, "a finite number")
        return number

    def objects(self, name: str) -> list[dict[str, Any]]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self.wrong(name, "a list of objects")
        return value

    def object(self, name: str) -> "Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self.path(name))

    def wrong(self, name: str, right: str) -> Exception:
        value = self.values.get(name)
        shown = repr(value)[:60] if not isinstance(value, dict | list) else kind_of(value)
        return invalid(self.path(name), f"{self.path(name)} must be {right}, and is {shown}")


def strings(fields: Fields, name: str) -> Sequence[str]:
    """One string, or a list of them."""
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise fields.wrong(name, "a string or a list of strings")
    return tuple(value)
