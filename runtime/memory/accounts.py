"""What each namespace holds of the one budget, and the quota it must not pass.

A buffer is never shared between namespaces: forks stay in their parent's, and states are only reused within one. So an
account is exact: what is taken for a namespace's state is counted there until it is given back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from weakref import WeakValueDictionary

from serai.checkpoints.names import check_text
from serai.runtime.errors import BadParameter, OverQuota


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that one namespace may have; None sets no bound.

    `state_bytes` bounds its states in memory: those of its sessions, those kept for its reuse, and what is promised to
    its calls. Reaching it moves its own idle sessions out, then its calls wait, in order; what could never fit is
    refused. `sessions` bounds its live sessions, hot or cold, forks included, but not those that only stand by for
    others to begin from, as a server's kept places do; `waiting` its calls that wait for memory. Past these two a call
    is refused at once. All refusals are `OverQuota`.

    It is a ceiling, not a reserve: under it, a namespace shares the budget with the others.
    Raises `BadParameter` for numbers that are no whole numbers from 1 on (`waiting`: from 0 on).
    """

    state_bytes: int | None = None
    sessions: int | None = None
    waiting: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), 0 if one.name == "waiting" else 1
            if value is not None and (type(value) is not int or value < least):
                raise BadParameter(f"a quota's {one.name} is {value!r}, but must be a whole number from {least} on")


NO_QUOTA = Quota()


class Account:
    """One namespace's: bytes of live buffers, bytes promised to calls under way, live sessions, waiting calls."""

    __slots__ = ("__weakref__", "live_bytes", "namespace", "quota", "reserved_bytes", "sessions", "waiting")

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.quota = NO_QUOTA
        self.live_bytes = 0
        self.reserved_bytes = 0
        self.sessions = 0
        self.waiting = 0

    @property
    def is_tenant(self) -> bool:
        """Whether it has a quota; then its users learn nothing of what others hold."""
        return self.quota is not NO_QUOTA

    @property
    def free_bytes(self) -> int | None:
        """What the quota leaves; None without one."""
        most = self.quota.state_bytes
        return None if most is None else most - self.live_bytes - self.reserved_bytes

    def has_room(self, needed_bytes: int) -> bool:
        free = self.free_bytes
        return free is None or needed_bytes <= free

    def check_bytes(self, needed_bytes: int, held_bytes: int = 0) -> None:
        """Raise `OverQuota` when `needed_bytes` beside `held_bytes` could not be had even alone."""
        most = self.quota.state_bytes
        if most is not None and needed_bytes + held_bytes > most:
            raise OverQuota(self.namespace, "bytes of state", needed=needed_bytes, used=held_bytes, limit=most)

    def check_sessions(self, more: int = 1) -> None:
        """Raise `OverQuota` when it may not open so many more sessions."""
        most = self.quota.sessions
        if most is not None and self.sessions + more > most:
            raise OverQuota(self.namespace, "sessions", needed=more, used=self.sessions, limit=most)

    def check_waiting(self) -> None:
        """Raise `OverQuota` when no more of its calls may wait for memory."""
        most = self.quota.waiting
        if most is not None and self.waiting >= most:
            raise OverQuota(self.namespace, "calls waiting for memory", needed=1, used=self.waiting, limit=most)


class Accounts:
    """All accounts of one runtime. One without a quota lasts for as long as somebody holds something of it."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, Account] = WeakValueDictionary()
        self._bounded: dict[str, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        """Those with a quota, and those that hold something, by name."""
        return iter(sorted(self._known.values(), key=lambda one: one.namespace))

    def of(self, namespace: str) -> Account:
        """The account of a namespace."""
        account = self._known.get(namespace)
        if account is None:
            account = self._known[namespace] = Account(namespace)
        return account

    def set_quota(self, namespace: str, quota: Quota | None) -> None:
        """Bound a namespace from now on; None takes its quota away. Raises `NameInvalid` for what is no namespace."""
        check_text(namespace, "namespace", may_be_empty=True)
        account = self.of(namespace)
        account.quota = NO_QUOTA if quota is None else quota
        if quota is None:
            self._bounded.pop(namespace, None)
        else:
            self._bounded[namespace] = account
