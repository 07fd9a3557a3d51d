"""Sizes as people write them."""

from typing import Any

import pytest

from serai.runtime.errors import BadParameter
from serai.runtime.memory.byte_sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        (" 2GB ", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        ("512M", 512 * 2**20),
        ("4k", 4096),
        ("1TiB", 2**40),
        ("1PB", 10**15),
        ("7b", 7),
        ("1536", 1536),
        ("1.9", 1),
        (2**33, 2**33),
    ],
)
def test_sizes_are_exact(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "0", "-1", "0.4", "1e9", "nan", "inf", "2GiBs", "2 G B", "1,000", "٣GiB", "9" * 99, -5, 0, True, 2.0],
)
def test_what_is_no_size_is_refused_with_examples(text: Any) -> None:
    with pytest.raises(BadParameter, match=r"^store is .*, but must be a size above zero such as '2GiB'"):
        parse_bytes(text, name="store")
