"""Every error a user of the runtime can meet, named by situation.

Each says in one sentence what is wrong and what would be right. The classes that concern stored state live in
`serai.checkpoints.errors` (that package imports nothing of ours) and are re-exported here, so that
`except serai.runtime.errors.SeraiError` catches all of them.
"""

from collections.abc import Mapping

from serai.checkpoints.errors import (
    FormatUnknown,
    ModelMismatch,
    NameInvalid,
    NodeInUse,
    NotOwner,
    PlaceFailed,
    PlaceUnknown,
    SeraiError,
    SessionGone,
    SnapshotCorrupt,
    SnapshotMissing,
    StoreBusy,
    StoreClosed,
    StoreFailed,
    StoreFull,
    StoreInvalid,
)

__all__ = [
    "BadParameter",
    "BudgetTooSmall",
    "ConfigInvalid",
    "DeadlineMissed",
    "EndsUnwritten",
    "EngineFailed",
    "FormatUnknown",
    "GrammarFailed",
    "LogitsInvalid",
    "LogitsNotFinite",
    "ModelMismatch",
    "ModelNotFound",
    "NameInvalid",
    "NodeInUse",
    "NotOwner",
    "NothingToContinue",
    "OutOfBudget",
    "OverQuota",
    "PlaceFailed",
    "PlaceUnknown",
    "PositionUnavailable",
    "PromptTooLong",
    "SeraiError",
    "SessionBusy",
    "SessionClosed",
    "SessionGone",
    "ShuttingDown",
    "SnapshotCorrupt",
    "SnapshotMissing",
    "StoreBusy",
    "StoreClosed",
    "StoreFailed",
    "StoreFull",
    "StoreInvalid",
    "TooManyWaiting",
    "WaitedTooLong",
    "WeightsInvalid",
]


class BadParameter(SeraiError, ValueError):
    """An argument has a value that can't be right; the sentence names the argument, the value and the valid range."""


class ConfigInvalid(SeraiError):
    """A model's config.json describes something that can't be run; the sentence names the key and the value found."""


class WeightsInvalid(SeraiError):
    """A model's tensors or tokenizer files are missing, damaged or of the wrong shape; the sentence names the file."""


class ModelNotFound(SeraiError):
    """No model by that name; the sentence lists where it was looked for."""


class BudgetTooSmall(SeraiError):
    """The byte budget is under what the model needs to run one session.

    Attributes: `budget_bytes`, `floor_bytes`.
    """

    def __init__(self, *, budget_bytes: int, floor_bytes: int, would_fit: str) -> None:
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        super().__init__(
            f"a budget of {budget_bytes:,} bytes is under the {floor_bytes:,} bytes this model needs to run one "
            f"session; {would_fit}"
        )


class OutOfBudget(SeraiError):
    """The budget has no room left for what a session needs now; the session stays as it was.

    Attributes: `needed_bytes`; `free_bytes`, which is None for a namespace with a quota: it is not told what others
    leave.
    """

    def __init__(self, *, what: str, needed_bytes: int, free_bytes: int | None) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        left = "has less left" if free_bytes is None else f"has {free_bytes:,} left"
        super().__init__(
            f"{what} needs {needed_bytes:,} bytes and the budget {left}; pause or close a session, "
            "or open the runtime with a larger budget"
        )


class OverQuota(OutOfBudget):
    """A namespace would pass its quota; the session stays as it was.

    Attributes: `namespace`; `resource`, what the quota bounds, as "bytes of state", "sessions" or "calls waiting for
    memory"; `needed`, `used` and `limit`, in its units. `needed_bytes` is 0 for what isn't counted in bytes.
    """

    def __init__(self, namespace: str, resource: str, *, needed: int, used: int, limit: int) -> None:
        super().__init__(what="", needed_bytes=needed if resource == "bytes of state" else 0, free_bytes=None)
        self.namespace = namespace
        self.resource = resource
        self.needed = needed
        self.used = used
        self.limit = limit
        self.args = (
            f"namespace {namespace!r} needs {needed:,} more than the {used:,} {resource} it has, and its quota is "
            f"{limit:,}; pause or close one of its sessions, or ask for a larger quota",
        )


class TooManyWaiting(SeraiError):
    """The queue of calls that wait for memory is full; try again later.

    Attribute: `waiting`, None for a namespace with a quota.
    """

    def __init__(self, *, waiting: int | None) -> None:
        self.waiting = waiting
        many = "as many calls as may" if waiting is None else f"{waiting:,} calls, which is all that may,"
        super().__init__(f"{many} are waiting for memory already; try again later")


class WaitedTooLong(SeraiError):
    """No memory became free in time; the session stays as it was.

    Attributes: `needed_bytes`; `free_bytes`, what is free of the budget. A namespace with a quota is told what is free
    of that, if it waited for that, and None otherwise.
    """

    def __init__(self, *, waited_s: float, needed_bytes: int, free_bytes: int | None) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        free = "" if free_bytes is None else f" ({free_bytes:,} are)"
        super().__init__(
            f"{needed_bytes:,} bytes did not become free within {waited_s:g} s{free}; pause or close a "
            "session, or open the runtime with a larger budget or with a store to move idle sessions to"
        )


class DeadlineMissed(SeraiError):
    """A call passed its deadline, or could be seen not to meet it; the session stays as it was.

    Attributes: `left_s`, the seconds that were left; `needed_s`, those it would take, or None when time had passed.
    """

    def __init__(self, *, what: str, left_s: float, needed_s: float | None = None) -> None:
        self.left_s = left_s
        self.needed_s = needed_s
        if needed_s is None:
            reason = f"was not done {left_s:g} s after it was asked for, which was its deadline"
        else:
            reason = f"would take about {needed_s:.1f} s at the present speed, and its deadline leaves {left_s:.1f} s"
        super().__init__(f"{what} {reason}; the session stays as it was, so ask again with more time")


class PromptTooLong(SeraiError):
    """The tokens would pass the model's context length.

    Attributes: `position`, `added_tokens`, `limit_tokens`.
    """

    def __init__(self, *, position: int, added_tokens: int, limit_tokens: int) -> None:
        self.position = position
        self.added_tokens = added_tokens
        self.limit_tokens = limit_tokens
        super().__init__(
            f"{added_tokens:,} tokens after position {position:,} would pass the model's context of "
            f"{limit_tokens:,} tokens; {max(limit_tokens - position, 0):,} still fit"
        )


class SessionBusy(SeraiError):
    """Another call is using the session; one session is one timeline, so calls never interleave."""

    def __init__(self, *, session_id: str, doing: str) -> None:
        super().__init__(
            f"session {session_id} is busy with {doing}; wait for that to finish, or fork the session to work beside it"
        )


class SessionClosed(SeraiError):
    """The session was closed or paused through this object."""

    def __init__(self, *, session_id: str, how: str) -> None:
        super().__init__(f"session {session_id} was {how}; resume it by its id to go on")


class NothingToContinue(SeraiError):
    """A generation was asked for at position 0, where no token has been read and so no next one is defined."""

    def __init__(self, *, session_id: str) -> None:
        super().__init__(f"session {session_id} is empty, so there is nothing to continue; append at least one token")


class PositionUnavailable(SeraiError):
    """A position or turn was asked for that the session doesn't have."""

    def __init__(self, *, what: str, asked: int, last: int) -> None:
        super().__init__(f"{what} {asked} does not exist; this session has {what}s 0 to {last}")


class NodeElsewhere(PositionUnavailable):
    """A node was named that is not on the session's way to here."""

    def __init__(self, *, node_id: str, session_id: str) -> None:
        SeraiError.__init__(
            self,
            f"node {node_id} is not on the way of session {session_id}; `Runtime.resume` branches off from any node "
            "of the store",
        )


class LogitsInvalid(SeraiError):
    """The model gave logits that no token can be drawn from (NaN); the session ends at the last good token."""


class LogitsNotFinite(LogitsInvalid):
    """What the model computed is no finite number: it is the weights or the state before, not the sampling, at fault.

    Attribute: `position`, after whose token the logits were wanted.
    """

    def __init__(self, *, bad: int, of: int, position: int, stays_at: int) -> None:
        self.position = position
        super().__init__(
            f"the model gave {bad} of {of} logits that are no finite numbers at position {position}, so the session "
            f"stays at position {stays_at}"
        )


class GrammarFailed(SeraiError):
    """The grammar a generation was to follow could not say what may come next; the session ends at the last token."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the grammar of this generation can't go on: {why[:300]}; ask with a simpler one")


class EndsUnwritten(SeraiError):
    """Several sessions ended with the runtime, and the last tokens of each could not be written down.

    Attribute: `failures`, by session id.
    """

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self.failures = dict(failures)
        told = "; ".join(f"session {name}: {error}" for name, error in self.failures.items())
        super().__init__(f"the last tokens of {len(self.failures)} sessions were not written down: {told}")


class ShuttingDown(SeraiError):
    """The runtime is closing and takes no new work."""

    def __init__(self) -> None:
        super().__init__("the runtime is shutting down and takes no new work; open it again to go on")


class EngineFailed(SeraiError):
    """The engine raised something unforeseen in a step; what failed is chained as the cause."""

    def __init__(self, *, cause: BaseException) -> None:
        super().__init__(
            f"the engine failed with {type(cause).__name__}: {cause}; every session's durable tokens are kept, so "
            "open the runtime again and resume"
        )
