"""The parts sessions are made of, without an engine: for measuring what is done to states that nobody reads on."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from serai.checkpoints.names import new_id
from serai.checkpoints.snapshot import Fingerprint, StateLayout
from serai.checkpoints.store import Store
from serai.runtime.engine_thread import EngineThread
from serai.runtime.services import Services, assemble
from serai.runtime.sessions.holding import Holding
from serai.runtime.sessions.journal import Journal
from serai.runtime.sessions.session import Session
from serai.runtime.sessions.turns import Span, Timeline
from serai.runtime.state import State, StatePool
from serai.runtime.step import Slice, StepPlan, StepResult


class _NoEngine:
    """Nothing is fed here."""

    def step(self, plan: StepPlan) -> StepResult:
        raise AssertionError("there is no engine that could feed a token")

    def go_on(self, plan: StepPlan, turn: Slice) -> StepResult | None:
        raise AssertionError("there is no engine that could feed a token")


@contextmanager
def services_without_engine(layout: StateLayout, store: Store | None = None) -> Iterator[Services]:
    """Services over states of that layout, of a model that has no name."""
    told = [one.name for one in fields(Fingerprint) if one.type in (str, "str")]
    described = {"state_layout": layout.describe()}
    fingerprint = Fingerprint(**(dict.fromkeys(told, "none") | described), experts_per_token=0)
    thread = EngineThread()
    try:
        yield assemble(
            engine=_NoEngine(),
            thread=thread,
            pool=StatePool(layout),
            journal=Journal(store, fingerprint, layout),
            tokenizer=None,
            vocab_size=layout.vocab,
            max_positions=1 << 20,
            stop_ids=frozenset(),
        )
    finally:
        thread.close()


def session_at(services: Services, state: State) -> Session:
    """A session of one appended turn that stands at a state, which it takes over; nothing of it is recorded yet."""
    vocab = services.pool.layout.vocab
    ids = array("i", [number % vocab for number in range(state.position)])
    return Session(
        services,
        session_id=new_id(),
        timeline=Timeline(ids, [Span(0, 0, generated=False)]),
        holding=Holding(services.keeper, state, state.position),
        namespace="",
        label="",
    )
