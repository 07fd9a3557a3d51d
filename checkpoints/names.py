"""Ids and names. Ids are made here and have one form; no text from outside is ever used as a path."""

import re
import secrets
from base64 import b32encode
from typing import Final

from serai.checkpoints.errors import NameInvalid

ID_FORM: Final = re.compile(r"[a-z2-7]{26}", re.ASCII)
MAX_NAME_CHARS: Final = 256


def new_id() -> str:
    """A random 128-bit id: 26 characters of lower-case base32, safe in a URL and the same in any letter case."""
    return b32encode(secrets.token_bytes(16)).decode("ascii").rstrip("=").lower()


def is_id(text: str) -> bool:
    """Whether `text` has the form of an id; says nothing about its existence."""
    return ID_FORM.fullmatch(text) is not None


def check_id(text: str, what: str) -> None:
    """Raise `NameInvalid` unless `text` has the form of an id."""
    if not is_id(text):
        raise NameInvalid(what=what, name=text, problem="ids are 26 characters from a-z and 2-7, as made by serai")


def check_text(text: str, what: str, *, may_be_empty: bool) -> None:
    """Raise `NameInvalid` unless `text` is a printable name of at most `MAX_NAME_CHARS` characters."""
    if not text and not may_be_empty:
        raise NameInvalid(what=what, name=text, problem="it is empty")
    if len(text) > MAX_NAME_CHARS:
        raise NameInvalid(
            what=what, name=text, problem=f"it has {len(text)} characters and {MAX_NAME_CHARS} are allowed"
        )
    if not text.isprintable() or text != text.strip():
        raise NameInvalid(what=what, name=text, problem="it has control characters or spaces at its ends")


def check_tag(text: str) -> None:
    """Raise `NameInvalid` unless `text` can be a tag: a printable name that cannot be mistaken for an id."""
    check_text(text, "tag", may_be_empty=False)
    if is_id(text):
        raise NameInvalid(what="tag", name=text, problem="it has the form of an id and would hide one")
