"""What a monitor watches and acts on: a small protocol, and the values that cross it.

Over HTTP, below the server's address: `GET /serai/status` gives `Status.to_json()`; `POST /serai/actions` takes
`Action.to_json()` and gives `Outcome.to_json()`; `GET /serai/events` is an event stream of `SessionEvent`s;
`GET /serai/model` gives the memory that other kinds of attention would take, and whether the asker may act;
`GET /serai/sessions/ID/detail` gives `SessionDetail.to_json()`; `POST /serai/sessions/ID/say` takes `{"text": ...}` and
streams the reply's passages; `GET /serai/sessions/ID/export` streams a bundle. An error's sentence is in
`{"error": {"message": ...}}`.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from serai.runtime.errors import BadParameter, SeraiError
from serai.runtime.memory.attention import AttentionCost
from serai.runtime.monitor.detail import SessionDetail
from serai.runtime.monitor.transcript import Passage
from serai.runtime.sessions.events import SessionEvent
from serai.runtime.status import Status


class SourceUnreachable(SeraiError):
    """Nothing answers, or what answers can't be understood. It may be back later."""

    def __init__(self, *, source: str, problem: str) -> None:
        super().__init__(f"{source} can't be watched: {problem}")


class ActionRefused(SeraiError):
    """The runtime did not do what was asked; the sentence says why."""


class ActionKind(Enum):
    """What can be done to a session from outside."""

    FORK = "fork"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    TAG = "tag"
    LABEL = "label"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do to one session. `value` is the tag, the label or the fork's label.

    For RESUME `session_id` may also be a point or a tag. FORK starts at the end of a `turn` or at a `position`, where
    one is given, instead of where the session stands.
    """

    kind: ActionKind
    session_id: str
    value: str | None = None
    turn: int | None = None
    position: int | None = None

    def to_json(self) -> dict[str, str | int | None]:
        places = {"turn": self.turn, "position": self.position}
        given = {name: number for name, number in places.items() if number is not None}
        return {"action": self.kind.value, "session": self.session_id, "value": self.value, **given}

    @classmethod
    def from_json(cls, body: object) -> "Action":
        """Raises `BadParameter` for anything `to_json` would not have made."""
        if not isinstance(body, Mapping):
            raise BadParameter('an action is an object such as {"action": "fork", "session": "...", "value": null}')
        name, session_id, value = body.get("action"), body.get("session"), body.get("value")
        kinds = [kind.value for kind in ActionKind]
        if name not in kinds:
            raise BadParameter(f"action is {name!r}, but must be one of {', '.join(kinds)}")
        if not isinstance(session_id, str) or not session_id:
            raise BadParameter(f"session is {session_id!r}, but must be the id of a session")
        if value is not None and not isinstance(value, str):
            raise BadParameter(f"value is {value!r}, but must be text or null")
        places = {place: body.get(place) for place in ("turn", "position")}
        for place, number in places.items():
            if number is not None and (type(number) is not int or number < 0):
                raise BadParameter(f"{place} is {number!r}, but must be a number from 0 on or null")
        return cls(ActionKind(name), session_id, value, **places)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sentence on what was done; `session_id` is the new session or point, where there is one."""

    message: str
    session_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"message": self.message, "session": self.session_id}


@dataclass(frozen=True, slots=True)
class About:
    """`comparison`: what the model's sessions take, and would take with other kinds of attention; empty when not known.
    `may_act`: whether actions and texts are open to whoever asks; without the key only figures are."""

    comparison: tuple[AttentionCost, ...] = ()
    may_act: bool = True


class Source(Protocol):
    """A runtime, seen from a monitor. Everything but `name` and `close` may raise `SourceUnreachable`."""

    @property
    def name(self) -> str:
        """What a person calls it: an address, a path, "demo"."""

    async def status(self) -> Status:
        """The figures now."""

    async def about(self) -> About:
        """What changes only when the runtime does."""

    async def detail(self, session_id: str) -> SessionDetail | None:
        """What a session says and its nodes; None for one that is not live or not the asker's to read."""

    def say(self, session_id: str, text: str) -> AsyncGenerator[Passage, None]:
        """Say something to a live session and give the reply piece by piece; closing it ends the reply. Raises
        `ActionRefused`."""

    async def act(self, action: Action) -> Outcome:
        """Do it; raises `ActionRefused` with the reason when it was not done."""

    async def export(self, session_id: str, path: Path) -> Outcome:
        """Write the session with all it continues from to a new file here; raises `ActionRefused`."""

    def events(self) -> AsyncGenerator[SessionEvent, None]:
        """What happens from now on. Ends at once when the source tells no events."""

    async def close(self) -> None:
        """Let go of connections."""
