"""Sizes in bytes as people write them."""

import re
from decimal import Decimal

from serai.runtime.errors import BadParameter

_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
    **{letter: 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?) ?([a-z]{0,3})", re.ASCII)


def parse_bytes(text: str | int, *, name: str = "budget") -> int:
    """Whole bytes from "2GiB" (2^30 each), "1.5 GB" (10^9 each), "512M" (2^20, as for ulimit and docker) or a number.

    Fractions of a byte are dropped. Raises `BadParameter`, calling the argument `name`.
    """
    if isinstance(text, str):
        match = _SIZE.fullmatch(text.strip().lower())
        factor = _FACTORS.get(match.group(2)) if match else None
        size = int(Decimal(match.group(1)) * factor) if match and factor else 0
    else:
        size = text if type(text) is int else 0
    if size <= 0:
        raise BadParameter(f"{name} is {text!r}, but must be a size above zero such as '2GiB', '1.5 GB' or 2147483648")
    return size
