"""JSON as every parser takes it."""

import json
import math
from typing import Any


def json_value(text: str | bytes) -> Any:
    """What a text says. Raises ValueError for what is no JSON, NaN, Infinity and numbers that no float64 can hold
    included: Python's parser would take them, but others won't, and they can't be written again."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is beyond all numbers")
    return value
