"""How large a JSON value is written down."""

import json


def json_bytes(value: object) -> int:
    """Bytes of a value as compact JSON in UTF-8."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))
