"""JSON as a file format: UTF-8 only, no repeated keys, no NaN, no nesting deeper than the parser can follow.

Python's parser keeps the last of two equal keys; in a safetensors header that would silently swap one weight for
another, so every file of a model goes through here.
"""

import json
from typing import NoReturn


class JsonError(ValueError):
    """The bytes are not acceptable JSON; the message completes a sentence that starts with the file's name."""


def parse_json(data: bytes) -> object:
    """The value that `data` spells. Raises `JsonError` and nothing else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"is not UTF-8 text (byte {error.start} of {len(data):,})") from None
    try:
        return json.loads(text, object_pairs_hook=_unique_object, parse_constant=_refuse_constant)
    except JsonError:
        raise
    except RecursionError:
        raise JsonError("nests brackets too deeply to be read") from None
    except ValueError as error:  # a syntax error, or an integer of thousands of digits
        raise JsonError(f"is not valid JSON ({error})") from None


def parse_json_object(data: bytes) -> dict[str, object]:
    """Like `parse_json`, for a file that must hold one object."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise JsonError(f"holds a JSON {json_type(value)} where an object is due")
    return value


def json_type(value: object) -> str:
    """JSON's own word for the type of a parsed value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "number"


def shown(value: object, limit: int = 120) -> str:
    """A parsed value for an error sentence: strings quoted and control characters escaped; cut when it is long."""
    if value is None or isinstance(value, bool):
        return str(json.dumps(value))
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"holds the key {shown(key)} twice")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"holds {name}, which is not a JSON number")
