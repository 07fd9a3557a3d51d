"""Tokens to text: no character is ever split, and no byte waits longer than it must."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.text.detokenizer import Detokenizer

TRICKY = st.lists(st.sampled_from(bytes.fromhex("20 41 80 82 90 a0 bf c2 e0 e2 ed ee f0 f4 f5 ff")), max_size=24)


class Pieces:
    """A tokenizer of as many tokens as there are pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = list(pieces)

    def token_bytes(self, token: int, *, control: bool = False) -> bytes:
        return self.pieces[token]


def stream(pieces: list[bytes]) -> list[str]:
    """What each piece made visible, and what came at the end."""
    detokenizer = Detokenizer(Pieces(pieces))
    shown = []
    for token in range(len(pieces)):
        shown.append(detokenizer.push(token))
        assert detokenizer.held_bytes <= 3
    return [*shown, detokenizer.finish()]


@given(TRICKY, st.lists(st.integers(0, 24), max_size=10))
def test_any_chunking_of_any_bytes_gives_the_text_of_the_whole(data: list[int], places: list[int]) -> None:
    """B74, B75."""
    whole = bytes(data)
    edges = [0, *sorted(min(place, len(whole)) for place in places), len(whole)]
    pieces = [whole[start:end] for start, end in itertools.pairwise(edges)]
    assert "".join(stream(pieces)) == whole.decode("utf-8", "replace")


@given(st.text(max_size=12))
def test_text_cut_at_every_byte_never_shows_a_replacement(text: str) -> None:
    """B74."""
    shown = stream([bytes((byte,)) for byte in text.encode()])
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["f0 9f", "99 82"], ["", "🙂", ""]),
        (["f0", "9f", "99", "82"], ["", "", "", "🙂", ""]),
        (["e4", "bd a0"], ["", "你", ""]),
        (["41 e2 82", "ac"], ["A", "€", ""]),
    ],
)
def test_a_character_appears_with_its_last_byte(pieces: list[str], expected: list[str]) -> None:
    """B74."""
    assert stream([bytes.fromhex(piece) for piece in pieces]) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["e2 82", "20 78"], ["", "\ufffd x", ""]),
        (["f0"], ["", "\ufffd"]),
        (["80 80", "80 80 80"], ["\ufffd" * 2, "\ufffd" * 3, ""]),
        (["f0 9f 99"], ["", "\ufffd"]),
    ],
)
def test_bytes_that_cannot_be_text_are_replaced_as_soon_as_that_is_sure(pieces: list[str], expected: list[str]) -> None:
    """B75."""
    assert stream([bytes.fromhex(piece) for piece in pieces]) == expected


def test_after_finish_a_new_text_begins() -> None:
    detokenizer = Detokenizer(Pieces([b"\xe2\x82", b"\xac", b"x"]))
    assert (detokenizer.push(0), detokenizer.finish(), detokenizer.finish()) == ("", "\ufffd", "")
    assert (detokenizer.push(1), detokenizer.push(2)) == ("\ufffd", "x")
