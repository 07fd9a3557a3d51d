"""Who asks: an API key with its namespace and quota, and how urgent its requests are."""

import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from blake3 import blake3

from serai.checkpoints.names import check_text
from serai.runtime.errors import BadParameter
from serai.runtime.memory.accounts import NO_QUOTA, Quota
from serai.runtime.memory.byte_sizes import parse_bytes
from serai.runtime.scheduler import HIGHEST_PRIORITY, weight_of
from serai.runtime.server.errors import invalid
from serai.runtime.server.fields import Fields
from serai.runtime.sessions.deadline import Deadline

PRIORITY, DEADLINE = "serai:priority", "serai:deadline_s"
"""Fields a request may have that no other API knows: how it shares the engine, and seconds from its arrival."""

TAG_BORDER = ": "
"""Between a namespace and the name of a tag in it."""

SECRET, SECRET_ENV = "key", "key_env"
QUOTA = tuple(one.name for one in fields(Quota))


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key and what its holder may.

    `namespace` parts its sessions from those of others; two keys may share one, and with it one quota. `priority` is
    that of its requests unless they ask for another, at most `most_priority`; `deadline_s` is the most time one may
    take. `may_pause`: it may pause the engine for the other namespaces, too.

    A request under way takes a session of the `quota`, two where it has notes for the model; what is kept to go on from
    takes none.
    """

    secret: str = field(repr=False)
    namespace: str = ""
    priority: int = 0
    most_priority: int | None = None
    deadline_s: float | None = None
    may_pause: bool = False
    quota: Quota = NO_QUOTA

    def __post_init__(self) -> None:
        if not self.secret or not self.secret.isascii() or not self.secret.isprintable():
            raise BadParameter("an API key must be printable ASCII of at least one character")
        check_text(self.namespace, "namespace", may_be_empty=True)
        if TAG_BORDER in self.namespace:
            raise BadParameter(f"the namespace {self.namespace!r} can't contain {TAG_BORDER!r}, which ends it in tags")
        for priority in (self.priority, self.highest):
            weight_of(priority)
        if self.highest < self.priority:
            raise BadParameter(f"most_priority is {self.highest}, under the priority of {self.priority}")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise BadParameter(f"a key's deadline_s is {self.deadline_s!r}, but must be more than 0")

    @property
    def highest(self) -> int:
        """The highest priority its requests may ask for."""
        return self.priority if self.most_priority is None else self.most_priority

    @classmethod
    def plain(cls, secret: str) -> "Key":
        """A key of which nothing else is said: its namespace is made from it."""
        return cls(secret=secret, namespace=f"key-{blake3(secret.encode()).hexdigest(8)}")

    @classmethod
    def of(cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> "Key":
        """From plain values, such as those of a file: `key` or, so that the file holds no secret, `key_env`, the name
        of an environment variable; then any of this class and of `Quota`. Raises `BadParameter`."""
        values = dict(given)
        secret, variable = values.pop(SECRET, None), values.pop(SECRET_ENV, None)
        if (secret is None) == (variable is None):
            raise BadParameter(f"an API key is given as {SECRET} or as {SECRET_ENV}, one of them")
        if variable is not None:
            secret = environment.get(str(variable))
            if secret is None:
                raise BadParameter(f"{SECRET_ENV} names the environment variable {variable}, which isn't set")
        if not isinstance(secret, str):
            raise BadParameter(f"an API key is text, and one is {secret!r:.60}")
        quota = {name: values.pop(name) for name in QUOTA if name in values}
        if "state_bytes" in quota:
            quota["state_bytes"] = parse_bytes(quota["state_bytes"], name="state_bytes")
        known = {"namespace": str, "priority": int, "most_priority": int, "deadline_s": float, "may_pause": bool}
        for name, value in values.items():
            if name not in known:
                names = ", ".join((SECRET, SECRET_ENV, *known, *QUOTA))
                raise BadParameter(f"{name!r} is nothing that an API key has; there are {names}")
            kinds = (int, float) if known[name] is float else (known[name],)
            if type(value) not in kinds:  # for an int, True is none
                raise BadParameter(f"a key's {name} is {value!r:.60}, which is no {known[name].__name__}")
        plain = cls.plain(secret)
        values.setdefault("namespace", plain.namespace)
        return cls(secret=secret, quota=Quota(**quota) if quota else NO_QUOTA, **values)


ANYBODY = Key(secret="-", most_priority=HIGHEST_PRIORITY)
"""Who asks a server that has no keys: a person on this machine."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, which came at `arrived_s` of the event loop's clock."""

    key: Key = ANYBODY
    arrived_s: float = 0.0

    @property
    def namespace(self) -> str:
        return self.key.namespace

    def urgency(self, given: Fields) -> tuple[int, Deadline | None]:
        """The priority and the deadline of a request. Raises a 400 for a priority its key doesn't give."""
        key = self.key
        priority = given.integer(PRIORITY, -HIGHEST_PRIORITY, key.highest)
        allowed_s = given.number(DEADLINE, 0.0) if given.has(DEADLINE) else None
        if allowed_s is not None and allowed_s <= 0:
            raise invalid(given.path(DEADLINE), f"{DEADLINE} must be more than 0 seconds, and is {allowed_s:g}")
        bounds = [one for one in (allowed_s, key.deadline_s) if one is not None]
        deadline = Deadline(self.arrived_s + min(bounds), min(bounds)) if bounds else None
        return key.priority if priority is None else priority, deadline


class Keys:
    """The keys of a server, compared in constant time."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = [(_digest(key.secret.encode()), key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def holder(self, header: bytes) -> Key | None:
        """The key that a request's `Authorization` header shows."""
        given = _digest(header[7:].strip() if header[:7].lower() == b"bearer " else b"")
        found = None
        for digest, key in self._keys:  # every key is compared, and as a digest, so that time tells no length either
            if hmac.compare_digest(digest, given):
                found = key
        return found


def _digest(secret: bytes) -> bytes:
    return blake3(secret).digest()


def quotas_of(keys: Iterable[Key]) -> dict[str, Quota]:
    """Each namespace's quota. Raises `BadParameter` for two keys that say different things of one namespace."""
    found: dict[str, Quota] = {}
    for key in keys:
        if key.quota is not NO_QUOTA and found.setdefault(key.namespace, key.quota) != key.quota:
            raise BadParameter(f"two keys of the namespace {key.namespace!r} have different quotas; give it one")
    return found
