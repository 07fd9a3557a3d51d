"""The errors a person meets, each named by its situation and phrased once, here.

`SeraiError` is the base of everything the project raises on purpose. It lives in this package because this package
imports nothing of ours.
"""

from collections.abc import Sequence


class SeraiError(Exception):
    """Base of all errors raised by serai on purpose; the message is one sentence for a person."""


class SnapshotCorrupt(SeraiError):
    """Stored bytes are not what was written; nothing of them has been used."""

    def __init__(self, *, what: str, problem: str) -> None:
        super().__init__(
            f"{what} is damaged: {problem}; it was not used, and replaying the token ids rebuilds its state"
        )
        self.what = what
        self.problem = problem


class FormatUnknown(SeraiError):
    """The bytes are whole, but written in a form this build does not read."""

    def __init__(self, *, what: str, found: object, supported: object) -> None:
        super().__init__(f"{what} is written in format {found!r}, and this build of serai reads {supported}")
        self.what = what
        self.found = found
        self.supported = supported


class ModelMismatch(SeraiError):
    """A snapshot belongs to another model, or to the same model under other options."""

    def __init__(
        self, *, node_id: str, fields: Sequence[str], stored: Sequence[object], running: Sequence[object]
    ) -> None:
        pairs = ", ".join(
            f"{field} (stored {was!r}, running {now!r})"
            for field, was, now in zip(fields, stored, running, strict=True)
        )
        super().__init__(
            f"the snapshot of node {node_id} was made under another model or options: it differs in {pairs}"
        )
        self.node_id = node_id
        self.fields = tuple(fields)


class SessionGone(SeraiError):
    """No node, session or tag goes by this name."""

    def __init__(self, *, name: str) -> None:
        super().__init__(f"nothing is stored under {_shown(name)}: it is no node id, session id or tag of this store")
        self.name = name


class SnapshotMissing(SeraiError):
    """The node is known, but no snapshot of it is stored."""

    def __init__(self, *, node_id: str) -> None:
        super().__init__(f"node {node_id} has no snapshot; its state can be rebuilt by replaying its token ids")
        self.node_id = node_id


class NameInvalid(SeraiError, ValueError):
    """An id, tag or label from outside has a form that is never accepted."""

    def __init__(self, *, what: str, name: str, problem: str) -> None:
        super().__init__(f"{_shown(name)} cannot be a {what}: {problem}")
        self.what = what
        self.name = name


class NodeInUse(SeraiError):
    """A node cannot be erased while others are built on it."""

    def __init__(self, *, node_id: str, children: int) -> None:
        super().__init__(
            f"node {node_id} cannot be erased: {children} other node(s) continue from it; erase those first"
        )
        self.node_id = node_id
        self.children = children


class NotOwner(SeraiError):
    """A session cannot be used, moved or taken here, because of who owns it."""

    def __init__(self, *, session_id: str, problem: str, remedy: str) -> None:
        super().__init__(f"session {session_id} {problem}; {remedy}")
        self.session_id = session_id


class PlaceUnknown(SeraiError):
    """No place to push to or pull from can be reached by this name."""

    def __init__(self, *, url: str, problem: str) -> None:
        super().__init__(f"{_shown(url)} cannot be used as a place for sessions: {problem}")
        self.url = url


class PlaceFailed(SeraiError):
    """A place to push to or pull from could not be reached, or refused; what is here is untouched."""

    def __init__(self, *, url: str, doing: str, reason: str) -> None:
        super().__init__(f"{doing} failed at {_shown(url)}: {reason}; what is stored here is untouched, try again")
        self.url = url
        self.reason = reason


class TransferBroken(SeraiError):
    """A bundle ended before its end; what came whole is kept unseen for the next attempt."""

    def __init__(self, *, received_bytes: int) -> None:
        super().__init__(f"the transfer broke off after {received_bytes} bytes; start it again to send what is missing")
        self.received_bytes = received_bytes


class TransferStopped(SeraiError):
    """Whoever asked for a transfer called it off; what came whole is kept unseen for the next attempt."""

    def __init__(self) -> None:
        super().__init__("the transfer was called off; start it again to send what is missing")


class StoreInvalid(SeraiError):
    """The folder is not a store that can be used as it is."""

    def __init__(self, *, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path} cannot be used as a store: {problem}; {remedy}")
        self.path = path


class StoreBusy(SeraiError):
    """Another process has the store open for writing."""

    def __init__(self, *, path: str, pid: int | None) -> None:
        owner = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"the store {path} is open in {owner}; close it there, or choose another folder")
        self.path = path
        self.pid = pid


class StoreClosed(SeraiError):
    """The store was closed before this call."""

    def __init__(self, *, path: str) -> None:
        super().__init__(f"the store {path} has been closed; open it again to use it")
        self.path = path


class StoreFull(SeraiError):
    """The disk or quota has no room left; what was stored before is untouched."""

    def __init__(self, *, path: str, doing: str) -> None:
        super().__init__(
            f"no space is left in the store {path} ({doing}); what was stored before is intact, free some and retry"
        )
        self.path = path


class StoreFailed(SeraiError):
    """The operating system refused an operation on the store; what was stored before is untouched."""

    def __init__(self, *, path: str, doing: str, reason: str) -> None:
        super().__init__(f"the store {path} could not finish {doing}: {reason}; what was stored before is intact")
        self.path = path
        self.reason = reason


def _shown(name: str) -> str:
    """A name from outside, shortened and with control characters escaped, fit for one line of an error."""
    return repr(name if len(name) <= 64 else name[:61] + "...")
