"""Statuses made by hand, a source that gives them out as told, and the text on the monitor's screen."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
from textual.pilot import Pilot

from serai.runtime.memory.attention import AttentionCost
from serai.runtime.monitor.app import Monitor
from serai.runtime.monitor.detail import NodeStatus, SessionDetail
from serai.runtime.monitor.source import About, Action, ActionRefused, Outcome, Source, SourceUnreachable
from serai.runtime.monitor.transcript import Passage, Voice
from serai.runtime.sessions.events import EventKind, SessionEvent
from serai.runtime.status import BudgetStatus, ExpertStatus, LayerHeat, SessionStatus, Status, WorkStatus

GB = 1_000_000_000
TIME = "12:00:00"


def session(
    name: str,
    *,
    label: str | None = None,
    parent: str | None = None,
    tier: str = "hot",
    doing: str | None = None,
    position: int = 1_000,
    own_bytes: int = 50_000_000,
    shared_bytes: int = 0,
    tokens_s: float = 0.0,
    idle_s: float = 5.0,
    returns_in_s: float | None = None,
    namespace: str = "",
    reused_tokens: int = 0,
    inexact: bool = False,
) -> SessionStatus:
    return SessionStatus(
        id=name,
        label=name if label is None else label,
        namespace=namespace,
        workflow=parent or name,
        parent=parent,
        tier=tier,
        doing=doing,
        position=position,
        turn=2,
        own_bytes=own_bytes,
        shared_bytes=shared_bytes,
        tokens_s=tokens_s,
        reused_tokens=reused_tokens,
        idle_s=idle_s,
        returns_in_s=returns_in_s,
        inexact=inexact,
    )


FAMILY = (
    session("reader", doing="generate", position=23_222, own_bytes=229_000_000, tokens_s=11.5, idle_s=0.0),
    session("planner", parent="reader", shared_bytes=187_000_000, doing="append", tokens_s=240.0, idle_s=0.0),
    session("tests", parent="reader", shared_bytes=187_000_000, returns_in_s=12.0, reused_tokens=900),
    session("docs", parent="planner", shared_bytes=187_000_000, idle_s=200.0, inexact=True),
    session("search", tier="cold", own_bytes=0, position=51_130, idle_s=4_000.0, namespace="team-a"),
)

HEAT = "0123456789" + "97531" * 10 + "0000"
EXPERTS = ExpertStatus(
    slots=2_100,
    experts=6_656,
    hits=9_000,
    late=300,
    misses=1_000,
    guessed=800,
    guesses_used=600,
    read_bytes=3_500_000_000,
    read_s=1.4,
    layers=tuple(
        LayerHeat(layer, 300 + layer, 40 - layer, 80 - layer, HEAT[layer:] + HEAT[:layer]) for layer in range(1, 27)
    ),
)

DETAIL = SessionDetail(
    session_id="reader",
    position=23_222,
    passages=(
        Passage(Voice.SYSTEM, "You read logs.", is_cut=True),
        Passage(Voice.USER, "What happened first?"),
        Passage(Voice.REASONING, "The log has three errors. The second follows from the first."),
        Passage(Voice.ANSWER, "The database refused connections at 14:02,\n\nwhich is before the first timeout."),
    ),
    nodes=(
        NodeStatus("n0", "root", 0, 0, 0, stored=False, in_memory=False),
        NodeStatus("n1", "append", 20_000, 0, 20_000, stored=True, in_memory=False),
        NodeStatus("n2", "generate", 20_400, 0, 400, stored=False, in_memory=False),
        NodeStatus("n3", "append", 23_000, 1, 2_600, stored=False, in_memory=True),
        NodeStatus("n4", "generate", 23_222, 1, 222, stored=False, in_memory=False),
    ),
    earlier_nodes=37,
)


def status(
    sessions: Sequence[SessionStatus] = FAMILY,
    *,
    now_s: float = 1_000.0,
    steps: int = 100,
    live_bytes: int = GB,
    experts: ExpertStatus | None = EXPERTS,
    waiting_for_memory: int = 0,
) -> Status:
    return Status(
        model="nano",
        precision="fast",
        now_s=now_s,
        budget=BudgetStatus(16 * GB, 3 * GB, 8 * GB, GB // 2, live_bytes, GB // 4, GB // 8, 0),
        work=WorkStatus(steps, 5_000, 700, 900, 1, waiting_for_memory, 3, 2, 0.0011),
        experts=experts,
        store_bytes=2 * GB,
        sessions=tuple(sessions),
    )


class Scripted:
    """A source. Statuses are given out in order, the last one for ever; while `down` says why, nothing answers."""

    name = "scripted"

    def __init__(self, *statuses: Status, events: Sequence[SessionEvent] = (), refusal: str | None = None) -> None:
        self.statuses = list(statuses) or [status()]
        self.happens = list(events)
        self.refusal = refusal
        self.down: str | None = None
        self.actions: list[Action] = []
        self.exported: list[tuple[str, Path]] = []
        self.closed = False
        self.may_act = True
        self.details = DETAIL
        self.looked_into: list[str] = []
        self.said: list[tuple[str, str]] = []
        self.reply = [Passage(Voice.REASONING, "hm "), Passage(Voice.ANSWER, "It "), Passage(Voice.ANSWER, "is 42.")]
        self.silent_after: int | None = None
        self.hung_up = 0

    async def status(self) -> Status:
        self._check()
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    async def about(self) -> About:
        self._check()
        return About(
            (
                AttentionCost("this model (7 MLA + 20 KDA layers)", 8_064, 41_943_040),
                AttentionCost("all 27 layers full attention", 442_368),
            ),
            self.may_act,
        )

    async def detail(self, session_id: str) -> SessionDetail | None:
        self._check()
        self.looked_into.append(session_id)
        return replace(self.details, session_id=session_id)

    async def say(self, session_id: str, text: str) -> AsyncGenerator[Passage, None]:
        self._check()
        self.said.append((session_id, text))
        if self.refusal is not None:
            raise ActionRefused(self.refusal)
        try:
            for number, piece in enumerate(self.reply):
                if number == self.silent_after:
                    await anyio.sleep_forever()
                yield piece
        finally:
            self.hung_up += 1

    async def act(self, action: Action) -> Outcome:
        self._check()
        self.actions.append(action)
        if self.refusal is not None:
            raise ActionRefused(self.refusal)
        return Outcome(f"{action.kind.value} done", action.session_id)

    async def export(self, session_id: str, path: Path) -> Outcome:
        self.exported.append((session_id, path))
        return Outcome(f"written to {path}", session_id)

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        self._check()
        for event in self.happens:
            yield event

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed = True

    def _check(self) -> None:
        if self.down is not None:
            raise SourceUnreachable(source=self.name, problem=self.down)


def event(kind: EventKind, session_id: str, detail: str = "", *, missed: int = 0) -> SessionEvent:
    return SessionEvent(kind, session_id, 1_000.0, detail, missed)


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def watching(
    source: Source, *, size: tuple[int, int] = (80, 24), monotonic: Clock | None = None, light: bool = False
) -> AsyncIterator[tuple[Monitor, Pilot[None]]]:
    """The monitor over a source, after its first look; later ones are the test's to ask for."""
    app = Monitor(source, every_s=None, light=light, clock=lambda: TIME, monotonic=monotonic or Clock())
    async with app.run_test(size=size) as pilot:
        await app.poll()
        await pilot.pause()
        yield app, pilot
    if isinstance(source, Scripted):
        assert source.closed


async def done(app: Monitor, pilot: Pilot[None]) -> None:
    """Wait for actions under way, and for what they draw."""
    await app.workers.wait_for_complete()
    await pilot.pause()


def screen(app: Monitor) -> list[str]:
    """The lines on the screen, blanks at their ends left out."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


def names_in(folder: Path) -> list[str]:
    """The files in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())
