"""A runtime that isn't there: agents that read, think, fork and wait for tools, simulated from a seed.

The same seed gives the same story, one second a status, so tests and pictures can rely on it. Sizes are
those of Kimi-Linear-48B in fast precision: 20 KDA layers of 32 heads of 128 × 128 float32, 7 MLA layers of 576
bfloat16 latents a token (facts of its config.json).
"""

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import anyio

from serai.runtime.memory.attention import AttentionCost, kv_token_bytes, latent_token_bytes
from serai.runtime.monitor.demo_text import demo_detail
from serai.runtime.monitor.detail import SessionDetail
from serai.runtime.monitor.source import About, Action, ActionKind, ActionRefused, Outcome
from serai.runtime.monitor.transcript import Passage, Voice
from serai.runtime.sessions.events import EventKind, SessionEvent, Watcher
from serai.runtime.status import BudgetStatus, ExpertStatus, LayerHeat, SessionStatus, Status, WorkStatus

FIXED_BYTES = 20 * 32 * 128 * 128 * 4
TOKEN_BYTES = latent_token_bytes(layers=7, latent_width=576, value_bytes=2)
EXPERT_BYTES = 8_000_000_000
TRUNK_BYTES = 3_100_000_000
SCRATCH_BYTES = 410_000_000
BUDGET_BYTES = 16_000_000_000
SESSIONS = 12

_LABELS = ("reader", "planner", "tests", "review", "docs", "bisect", "port to arm", "summary", "search", "fix #214")
_KEPT_EVENTS = 200


@dataclass(slots=True)
class _Agent:
    """One simulated session."""

    status: SessionStatus
    busy_steps: int = 0
    tool_steps: int = 0
    said_tokens: int = 0


class Demo:
    """A `Source` over a simulation of `sessions` agents."""

    def __init__(self, *, seed: int = 7, sessions: int = SESSIONS, word_s: float = 0.08) -> None:
        self._word_s = word_s
        self._random = Random(seed)
        self._agents: dict[str, _Agent] = {}
        self._paused: dict[str, SessionStatus] = {}
        self._watchers: set[Watcher] = set()
        self._early: deque[SessionEvent] = deque(maxlen=_KEPT_EVENTS)
        self._now_s = 1_000.0
        self._prefilled = self._decoded = self._reused = 0
        self._hits, self._misses = 9_000, 1_000
        self._moves = 0
        for number in range(sessions):
            roots = [agent.status for agent in self._agents.values()]
            parent = self._random.choice(roots) if roots and number % 3 else None
            self._begin(parent, _LABELS[number % len(_LABELS)], self._random.randrange(2_000, 60_000))

    @property
    def name(self) -> str:
        return "demo"

    async def status(self) -> Status:
        self._step()
        sessions = tuple(agent.status for agent in self._agents.values())
        live = sum(one.own_bytes for one in sessions) + max((one.shared_bytes for one in sessions), default=0)
        return Status(
            model="Kimi-Linear-48B (simulated)",
            precision="fast",
            now_s=self._now_s,
            budget=BudgetStatus(
                budget_bytes=BUDGET_BYTES,
                trunk_bytes=TRUNK_BYTES,
                expert_bytes=EXPERT_BYTES,
                scratch_bytes=SCRATCH_BYTES,
                live_bytes=live,
                kept_bytes=3 * FIXED_BYTES,
                spare_bytes=2 * FIXED_BYTES,
                reserved_bytes=0,
            ),
            work=WorkStatus(
                steps=int(self._now_s) * 9,
                prefilled_tokens=self._prefilled,
                decoded_tokens=self._decoded,
                reused_tokens=self._reused,
                waiting_calls=sum(one.doing is not None for one in sessions) // 4,
                waiting_for_memory=0,
                demotions=self._moves,
                promotions=self._moves,
                loop_delay_p99_s=0.0011,
            ),
            experts=self._experts(),
            store_bytes=sum(one.position for one in sessions) * TOKEN_BYTES + len(self._paused) * FIXED_BYTES,
            sessions=sessions,
        )

    async def about(self) -> About:
        return About(
            (
                AttentionCost("this model (7 MLA + 20 KDA layers)", TOKEN_BYTES, FIXED_BYTES),
                AttentionCost(
                    "all 27 layers latent attention", latent_token_bytes(layers=27, latent_width=576, value_bytes=2)
                ),
                AttentionCost(
                    "all 27 layers full attention", kv_token_bytes(layers=27, kv_heads=32, head_dim=128, value_bytes=2)
                ),
            )
        )

    async def detail(self, session_id: str) -> SessionDetail | None:
        agent = self._agents.get(session_id)
        if agent is None:
            return None
        one, number = agent.status, list(self._agents).index(session_id)
        answering = one.doing == "generate"
        return demo_detail(session_id, number, one.position, one.turn, agent.said_tokens, answering=answering)

    async def say(self, session_id: str, text: str) -> AsyncGenerator[Passage, None]:
        if session_id not in self._agents:
            raise ActionRefused(f"session {session_id} is not live, so nothing can be said to it")
        answer = (
            f"This is a simulation, so nobody has read {len(text.split())} words of yours. A model would answer here."
        )
        for voice, said in ((Voice.REASONING, "The person tries the demo."), (Voice.ANSWER, answer)):
            for word in said.split(" "):
                await anyio.sleep(self._word_s)
                yield Passage(voice, f"{word} ")

    async def act(self, action: Action) -> Outcome:
        if action.kind is ActionKind.RESUME and action.session_id in self._paused:
            status = self._paused.pop(action.session_id)
            self._agents[status.id] = _Agent(replace(status, tier="hot", idle_s=0.0))
            self._tell(EventKind.OPENED, status.id, status.label)
            return Outcome(f"resumed at position {status.position:,}", status.id)
        agent = self._agents.get(action.session_id)
        if agent is None:
            raise ActionRefused(f"session {action.session_id} is not live, so there is nothing to {action.kind.value}")
        status = agent.status
        match action.kind:
            case ActionKind.FORK:
                where = status.position if action.position is None else min(action.position, status.position)
                fork = self._begin(replace(status, position=where), action.value or status.label, where)
                return Outcome(f"forked at position {where:,}", fork.id)
            case ActionKind.PAUSE:
                self._paused[status.id] = self._end(status.id, EventKind.PAUSED)
                return Outcome(f"paused at position {status.position:,}, {status.own_bytes:,} bytes written", status.id)
            case ActionKind.RESUME:
                agent.status = replace(status, tier="hot")
                return Outcome(f"in memory at position {status.position:,}", status.id)
            case ActionKind.CANCEL:
                if status.doing is None:
                    raise ActionRefused(f"session {status.id} has no call under way to cancel")
                agent.status, agent.busy_steps = replace(status, doing=None, tokens_s=0.0), 0
                return Outcome("the call was cancelled; the session keeps the tokens it had handed out", status.id)
            case ActionKind.TAG:
                return Outcome(f"tagged position {status.position:,} as {action.value!r}", status.id)
            case ActionKind.LABEL:
                agent.status = replace(status, label=action.value or "")
                return Outcome("labelled", status.id)
            case ActionKind.DELETE:
                self._end(status.id, EventKind.CLOSED)
                return Outcome("erased 4 nodes and 41,200 bytes of files", status.id)

    async def export(self, session_id: str, path: Path) -> Outcome:
        raise ActionRefused(f"a demo has nothing to write to {path}")

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        watcher = Watcher(_KEPT_EVENTS)
        while self._early:
            yield self._early.popleft()
        self._watchers.add(watcher)
        try:
            while True:
                yield await watcher.get()
        finally:
            self._watchers.discard(watcher)

    async def close(self) -> None:
        """There is nothing to let go of."""

    def _experts(self) -> ExpertStatus:
        """26 layers of 256 experts; in each some neighbours are wanted more, and which they are moves slowly."""
        layers = []
        for layer in range(1, 27):
            centre = (layer * 37 + int(self._now_s) // 20) % 64
            near = [min(abs(group - centre), 64 - abs(group - centre)) for group in range(64)]
            noise = Random(layer * 1_000 + int(self._now_s) // 5)
            heat = "".join(str(max(0, min(9, 9 - far // 2 + noise.choice((-2, -1, 0, 0, 1))))) for far in near)
            hits = self._hits // 26 + 7 * layer
            layers.append(LayerHeat(layer, hits, self._misses // 26 + layer % 5, 78 + layer % 6, heat))
        guessed = self._misses * 3 // 5
        return ExpertStatus(
            slots=2_100,
            experts=26 * 256,
            hits=self._hits,
            late=self._hits // 40,
            misses=self._misses,
            guessed=guessed,
            guesses_used=guessed * 4 // 5,
            read_bytes=self._misses * 3_500_000,
            read_s=self._misses * 1e-3,
            layers=tuple(layers),
        )

    def _step(self) -> None:
        """One second passes."""
        self._now_s += 1.0
        for agent in list(self._agents.values()):
            self._advance(agent)
        self._hits += 950
        self._misses += self._random.randrange(20, 60)

    def _advance(self, agent: _Agent) -> None:
        status, random = agent.status, self._random
        if agent.busy_steps:
            agent.busy_steps -= 1
            rate = status.tokens_s * random.uniform(0.8, 1.25)
            tokens = round(rate)
            agent.said_tokens += tokens
            self._count(status, tokens)
            agent.status = replace(
                status,
                position=status.position + tokens,
                own_bytes=status.own_bytes + tokens * TOKEN_BYTES,
                tokens_s=rate,
            )
            if not agent.busy_steps:
                agent.status = replace(agent.status, doing=None, tokens_s=0.0, turn=status.turn + 1)
                self._tell(EventKind.TURN_ENDED, status.id, f"at position {agent.status.position:,}")
                agent.tool_steps = random.choice((0, 0, 8, 20))
        elif agent.tool_steps:
            agent.tool_steps -= 1
            cold = status.tier == "cold" or (agent.tool_steps > 12 and random.random() < 0.2)
            if cold and status.tier == "hot":
                self._moves += 1
                self._tell(EventKind.DEMOTED, status.id)
            returns = float(agent.tool_steps) if agent.tool_steps else None
            tier = "cold" if cold and agent.tool_steps else "hot"
            agent.status = replace(status, idle_s=status.idle_s + 1.0, returns_in_s=returns, tier=tier)
        elif random.random() < 0.15:
            doing, rate = ("append", 240.0) if random.random() < 0.3 else ("generate", random.uniform(9.0, 14.0))
            agent.busy_steps = random.randrange(3, 12)
            agent.said_tokens = 0
            agent.status = replace(status, doing=doing, tokens_s=rate, idle_s=0.0, returns_in_s=None, tier="hot")
        else:
            agent.status = replace(status, idle_s=status.idle_s + 1.0)

    def _count(self, status: SessionStatus, tokens: int) -> None:
        if status.doing == "append":
            self._prefilled += tokens
        else:
            self._decoded += tokens

    def _begin(self, parent: SessionStatus | None, label: str, position: int) -> SessionStatus:
        letters = "abcdefghijklmnopqrstuvwxyz234567"
        session_id = "".join(self._random.choice(letters) for _ in range(26))
        position = position if parent is None else parent.position
        state = FIXED_BYTES + position * TOKEN_BYTES
        status = SessionStatus(
            id=session_id,
            label=label,
            namespace="demo",
            workflow=session_id if parent is None else parent.workflow,
            parent=None if parent is None else parent.id,
            tier="hot",
            doing=None,
            position=position,
            turn=0 if parent is None else parent.turn,
            own_bytes=state if parent is None else FIXED_BYTES,
            shared_bytes=0 if parent is None else state - FIXED_BYTES,
            tokens_s=0.0,
            reused_tokens=0 if parent is None else parent.position,
            idle_s=0.0,
            returns_in_s=None,
            inexact=False,
        )
        self._agents[session_id] = _Agent(status)
        self._reused += status.reused_tokens
        self._tell(EventKind.OPENED if parent is None else EventKind.FORKED, session_id, label)
        return status

    def _end(self, session_id: str, kind: EventKind) -> SessionStatus:
        status = self._agents.pop(session_id).status
        self._tell(kind, session_id, f"at position {status.position:,}")
        return status

    def _tell(self, kind: EventKind, session_id: str, detail: str = "") -> None:
        event = SessionEvent(kind, session_id, self._now_s, detail)
        if self._watchers:
            for watcher in self._watchers:
                watcher.put(event)
        else:
            self._early.append(event)
