"""Typed access to the keys of a config.json; each refusal is one sentence: the key, what it is, what would be right."""

import math
from collections.abc import Mapping
from typing import NoReturn

from serai.runtime.errors import ConfigInvalid
from serai.runtime.models.strict_json import shown

LARGEST_INT = 2**31 - 1
"""No size in a config.json comes near this; a larger one is damage, and refusing it keeps all products in int64."""


class ConfigKeys:
    """The keys of one JSON object. A null counts as absent, as it does for the libraries that write these files."""

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise `ConfigInvalid` about `key`; `problem` completes the sentence."""
        raise ConfigInvalid(f"{self._source}: {self._prefix}{key} {problem}")

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def integer(self, key: str, *, low: int = 1, high: int = LARGEST_INT, default: int | None = None) -> int:
        """A whole number from `low` to `high`; without a default the key is required."""
        wanted = f"a whole number from {low:,} to {high:,}"
        value = self._values.get(key)
        if value is None:
            return self._missing(key, wanted) if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._wrong(key, value, wanted)
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number from 1, or None when the key is absent or null."""
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, *, default: float | None = None, negative: bool = False) -> float:
        """A finite number above zero (below zero with `negative`); without a default the key is required."""
        wanted = f"a finite number {'below' if negative else 'above'} zero"
        value = self._values.get(key)
        if value is None:
            return self._missing(key, wanted) if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30:
            self._wrong(key, value, wanted)
        number = float(value)
        if not math.isfinite(number) or (number >= 0 if negative else number <= 0):
            self._wrong(key, value, wanted)
        return number

    def optional_number(self, key: str, *, negative: bool = False) -> float | None:
        """Like `number`, or None when the key is absent or null."""
        return self.number(key, negative=negative) if self.has(key) else None

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
        return value

    def word(self, key: str, supported: Mapping[str, object], *, default: str | None = None) -> str:
        """One of the supported words; without a default the key is required."""
        wanted = " or ".join(shown(word) for word in supported)
        value = self._values.get(key)
        if value is None:
            return self._missing(key, wanted) if default is None else default
        if not isinstance(value, str) or value not in supported:
            self._wrong(key, value, wanted)
        return value

    def integers(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of whole numbers from `low` to `high`; required."""
        wanted = f"a list of whole numbers from {low:,} to {high:,}"
        value = self._values.get(key)
        if value is None:
            self._missing(key, wanted)
        if not isinstance(value, list):
            self._wrong(key, value, wanted)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                self.refuse(key, f"holds {shown(item)}, but must be {wanted}")
        return tuple(value)

    def section(self, key: str) -> "ConfigKeys":
        """A nested object; required."""
        value = self._values.get(key)
        if value is None:
            self._missing(key, "an object")
        if not isinstance(value, dict):
            self._wrong(key, value, "an object")
        return ConfigKeys(value, self._source, f"{self._prefix}{key}.")

    def value(self, key: str) -> object:
        """The value as parsed, or None."""
        return self._values.get(key)

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def _missing(self, key: str, wanted: str) -> NoReturn:
        self.refuse(key, f"is missing; it must be {wanted}")

    def _wrong(self, key: str, value: object, wanted: str) -> NoReturn:
        self.refuse(key, f"is {shown(value)}, but must be {wanted}")
