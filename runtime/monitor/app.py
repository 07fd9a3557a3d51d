"""The monitor: a `Watcher` whose keys also act on the sessions it shows."""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

from textual.app import SystemCommand
from textual.screen import Screen

from serai.checkpoints.names import MAX_NAME_CHARS
from serai.runtime.monitor import keys
from serai.runtime.monitor.chat_page import Conversation
from serai.runtime.monitor.chat_screen import ChatScreen
from serai.runtime.monitor.dialogs import Ask, Confirm
from serai.runtime.monitor.model import LogEntry, View
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused, Outcome, SourceUnreachable
from serai.runtime.monitor.watcher import Watcher
from serai.runtime.status import SessionStatus

_SURE = {
    ActionKind.PAUSE: ("Pause {name}? Its program can't go on with it until it is resumed.", "pause"),
    ActionKind.CANCEL: ("Cancel what {name} is doing? It keeps the tokens it has handed out.", "cancel"),
    ActionKind.DELETE: ("Erase {name} from memory and from the store? This can't be undone.", "erase"),
}
"""What is asked before something is done that a key struck by mistake should not do."""


class Monitor(Watcher):
    """A watcher of `source` with all keys."""

    # Acting.

    def action_act(self, name: str) -> None:
        kind = ActionKind(name)
        session = self._acted_on()
        if session is None:
            return
        action = Action(kind, session.id, position=self._node_position() if kind is ActionKind.FORK else None)
        if kind in _SURE:
            question, verb = _SURE[kind]
            self.push_screen(Confirm(question.format(name=_name(session)), verb), partial(self._confirmed, action))
        else:
            self._start(action)

    def action_ask_fork(self) -> None:
        session = self._acted_on()
        if session is None:
            return

        def answered(place: str | None) -> None:
            digits = (place or "").strip().removeprefix("@").replace(",", "")
            if place is None:
                return
            if not (digits.isascii() and digits.isdigit()):
                self.model.tell("fork: name a turn such as 2, or a position such as @9000")
                self.redraw()
            elif "@" in place:
                self._start(Action(ActionKind.FORK, session.id, position=int(digits)))
            else:
                self._start(Action(ActionKind.FORK, session.id, turn=int(digits)))

        self.push_screen(
            Ask(
                f"Fork {_name(session)} at the end of which turn (0 to {session.turn:,}), or at which position (@9000)?"
            ),
            answered,
        )

    def _node_position(self) -> int | None:
        """Where the node under the cursor stands, where nodes are shown: a fork starts there."""
        detail = self.model.selected_detail()
        if self.model.view is not View.NODES or detail is None:
            return None
        return next((node.position for node in detail.nodes if node.id == self.model.node), None)

    def action_chat(self) -> None:
        session = self._acted_on()
        if session is not None:
            self.run_worker(self._chat(session))

    async def _chat(self, session: SessionStatus) -> None:
        """Fork the session, here or at the node under the cursor, and open a chat with the fork."""
        label = f"{session.label or session.id[:8]}, chat"[:MAX_NAME_CHARS].strip()
        fork = Action(ActionKind.FORK, session.id, label, position=self._node_position())
        try:
            detail = await self._source.detail(session.id)
            outcome = await self._source.act(fork)
        except (ActionRefused, SourceUnreachable) as error:
            self._tell("refused", session.id, f"chat: {error}")
            return
        earlier = () if detail is None or fork.position is not None else detail.passages
        chat = Conversation(session.label or session.id[:8], outcome.session_id or "", earlier)
        self._tell("asked", session.id, f"chat: {outcome.message}")
        self.push_screen(ChatScreen(self._source, chat), partial(self._chat_left, chat))
        await self.poll()

    def _chat_left(self, chat: Conversation, told: str | None) -> None:
        """The fork was put away."""
        self._tell("chat left", chat.session_id, told or "the chat was left")
        self.model.was_paused(chat.session_id)
        self.run_worker(self.poll())

    async def action_quit(self) -> None:
        """Leave; a chat that is open is put away first."""
        for screen in self.screen_stack:
            if isinstance(screen, ChatScreen):
                await screen.leave()
        self.exit()

    def _tell(self, what: str, session_id: str, told: str) -> None:
        """Say something and log it."""
        session = self.model.session(session_id)
        self.model.tell(told)
        self.model.log.append(LogEntry(self._clock(), what, session_id, "" if session is None else session.label, told))
        self.redraw()

    def action_ask_tag(self) -> None:
        self._ask_value(ActionKind.TAG, "A tag for the point where {name} stands:", lambda one: "")

    def action_ask_label(self) -> None:
        self._ask_value(ActionKind.LABEL, "Another label for {name}:", lambda one: one.label)

    def action_ask_export(self) -> None:
        session = self._acted_on()
        if session is None:
            return

        def answered(path: str | None) -> None:
            if path:
                export = partial(self._source.export, session.id, Path(path).expanduser())
                self.run_worker(self._report("export", session.id, export))

        self.push_screen(Ask(f"Write {_name(session)} to which new file here?", f"{session.id[:8]}.serai"), answered)

    def action_resume_other(self) -> None:
        def answered(name: str | None) -> None:
            if name and not self.model.about.may_act:
                self._tell("refused", "", "resume: this monitor only looks on; acting needs the server's key")
            elif name:
                self._start(Action(ActionKind.RESUME, name))

        self.push_screen(Ask("Resume which point, session or tag?"), answered)

    def _ask_value(self, kind: ActionKind, question: str, first: Callable[[SessionStatus], str]) -> None:
        session = self._acted_on()
        if session is None:
            return

        def answered(value: str | None) -> None:
            if value is not None:
                self._start(Action(kind, session.id, value))

        self.push_screen(Ask(question.format(name=_name(session)), first(session)), answered)

    def _acted_on(self) -> SessionStatus | None:
        """The selected session, where one is in view."""
        session = self.model.session(self.model.selected)
        if self.model.view not in (View.SESSIONS, View.DETAIL, View.NODES) or session is None:
            self.model.tell("select a session first (1 shows them)")
        elif not self.model.about.may_act:
            self.model.tell("this monitor only looks on: acting needs the server's key (--key or SERAI_API_KEY)")
        else:
            return session
        self.redraw()
        return None

    def _confirmed(self, action: Action, sure: bool | None) -> None:
        if sure:
            self._start(action)

    def _start(self, action: Action) -> None:
        self.run_worker(self._report(action.kind.value, action.session_id, partial(self._source.act, action)))

    async def _report(self, what: str, session_id: str, do: Callable[[], Awaitable[Outcome]]) -> None:
        """Do it, say what came of it, and look again."""
        try:
            outcome = await do()
        except (ActionRefused, SourceUnreachable) as error:
            self._tell("refused", session_id, f"{what}: {error}")
        else:
            self._tell("asked", session_id, f"{what}: {outcome.message}")
            if what == ActionKind.PAUSE.value:
                self.model.was_paused(session_id)
            elif what == ActionKind.DELETE.value:
                self.model.paused.pop(session_id, None)
        await self.poll()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The command palette: every key by its name."""
        for key in (*keys.VIEWS, *keys.LISTING, *keys.ACTIONS, *keys.OTHERS):
            yield SystemCommand(key.told, f"key: {key.shown}", partial(self.run_action, key.action))


def _name(session: SessionStatus) -> str:
    return f"“{session.label}”" if session.label else session.id[:8]
