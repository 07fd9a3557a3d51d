"""What a runtime tells of itself, as frozen plain values: monitor, metrics and tests all read these.

Sizes are in bytes, times in seconds. A buffer that several sessions share counts once in the runtime's figures, and as
`shared_bytes` in each of theirs.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """One live session.

    `workflow` is the session its tree began with, `parent` the one it was forked from. `tier` is "hot" or "cold";
    `doing` the call that holds it now. `tokens_s` is its rate over the last seconds, reading or generating. `idle_s`
    counts from the end of its last call, `returns_in_s` to when its tool is expected to answer. A cold one reads
    `replay_tokens` once more before it goes on.
    """

    id: str
    label: str
    namespace: str
    workflow: str
    parent: str | None
    tier: str
    doing: str | None
    position: int
    turn: int
    own_bytes: int
    shared_bytes: int
    tokens_s: float
    reused_tokens: int
    idle_s: float
    returns_in_s: float | None
    inexact: bool
    replay_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """Where the budget goes. `live_bytes` are sessions' states, `kept_bytes` states kept for reuse by others,
    `spare_bytes` freed buffers kept for the next step, `reserved_bytes` promised to calls under way, `ids_bytes` the
    token ids and timelines of all sessions, hot or cold (`memory/beside.py`)."""

    budget_bytes: int
    trunk_bytes: int
    expert_bytes: int
    scratch_bytes: int
    live_bytes: int
    kept_bytes: int
    spare_bytes: int
    reserved_bytes: int
    ids_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Everything that is held."""
        model = self.trunk_bytes + self.expert_bytes + self.scratch_bytes
        return model + self.live_bytes + self.kept_bytes + self.spare_bytes + self.ids_bytes

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class LayerHeat:
    """The experts of one layer: lookups since opening, how many are `held` now, and how much each was wanted lately.

    `heat` has one digit a group of neighbouring experts (`experts.heat`), from 9, within a factor of two of the most
    wanted group of any layer, down by one a halving; 0 is a group nobody wanted.
    """

    layer: int
    hits: int
    misses: int
    held: int
    heat: str


@dataclass(frozen=True, slots=True)
class ExpertStatus:
    """The expert cache since opening: `slots` of `experts` fit, `hits` and `misses` of lookups, bytes read.

    `late` of the hits found their read under way. `guessed` experts were read ahead, `guesses_used` of them were wanted
    when their layer came. `mode` says whether reads pass the page cache by ("direct") or not ("buffered"),
    `reads_in_flight` how many there are at a time. `degraded` says what could not be read, empty when everything could.
    """

    slots: int
    experts: int
    hits: int
    late: int
    misses: int
    guessed: int
    guesses_used: int
    read_bytes: int
    read_s: float
    mode: str = ""
    reads_in_flight: int = 0
    degraded: str = ""
    layers: tuple[LayerHeat, ...] = ()

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


@dataclass(frozen=True, slots=True)
class WorkStatus:
    """What has been done since opening, and what waits. `loop_delay_p99_s` is how late timers ran. `saves` are states
    that were stored, whoever asked for it, `failed_saves` those that could not be."""

    steps: int
    prefilled_tokens: int
    decoded_tokens: int
    reused_tokens: int
    waiting_calls: int
    waiting_for_memory: int
    demotions: int
    promotions: int
    loop_delay_p99_s: float
    saves: int = 0
    failed_saves: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceStatus:
    """What one namespace has of the budget, and the most it may (None: as much as there is).

    `live_bytes` are its states in memory, those kept for reuse included; `reserved_bytes` are promised to its calls
    under way; `waiting` of its calls wait for memory.
    """

    namespace: str
    sessions: int
    live_bytes: int
    reserved_bytes: int
    waiting: int
    quota_bytes: int | None
    quota_sessions: int | None
    quota_waiting: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """A runtime at one moment. `now_s` is the event loop's clock."""

    model: str
    precision: str
    now_s: float
    budget: BudgetStatus
    work: WorkStatus
    experts: ExpertStatus | None
    store_bytes: int | None
    sessions: tuple[SessionStatus, ...]
    namespaces: tuple[NamespaceStatus, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        return asdict(self)

    def __repr__(self) -> str:
        cold = sum(session.tier == "cold" for session in self.sessions)
        many = "" if len(self.sessions) == 1 else "s"
        return (
            f"<{self.model} {self.precision}: {len(self.sessions)} session{many} ({cold} cold), "
            f"{self.budget.used_bytes / 2**20:,.0f} of {self.budget.budget_bytes / 2**20:,.0f} MiB, "
            f"{self.work.prefilled_tokens:,} tokens read, {self.work.decoded_tokens:,} generated>"
        )
