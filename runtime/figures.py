"""The figures of a runtime, taken from its parts at one moment: what `Runtime.status` gives."""

from collections.abc import Callable
from dataclasses import dataclass

from serai.runtime.memory.accounts import Account
from serai.runtime.models.config import ModelConfig
from serai.runtime.services import Services
from serai.runtime.status import BudgetStatus, ExpertStatus, NamespaceStatus, Status, WorkStatus


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a runtime tells about the model it runs. `scratch_bytes` is what steps and the process itself take.
    `degraded` says what of the experts can't be read now: as `experts` does, but whoever asks all the time needs no
    picture of all layers for it."""

    name: str
    precision: str
    config: ModelConfig | None
    trunk_bytes: int
    expert_bytes: int
    scratch_bytes: int
    budget_bytes: int
    experts: Callable[[], ExpertStatus] | None = None
    degraded: Callable[[], str] | None = None


def figures(services: Services, facts: ModelFacts) -> Status:
    """A snapshot of all figures."""
    counters = services.driver.counters
    pool, now_s, kept_bytes = services.pool, services.now_s(), services.prefixes.kept_bytes
    return Status(
        model=facts.name,
        precision=facts.precision,
        now_s=now_s,
        budget=BudgetStatus(
            budget_bytes=facts.budget_bytes,
            trunk_bytes=facts.trunk_bytes,
            expert_bytes=facts.expert_bytes,
            scratch_bytes=facts.scratch_bytes,
            live_bytes=pool.live_bytes - kept_bytes,
            kept_bytes=kept_bytes,
            spare_bytes=pool.spare_bytes,
            reserved_bytes=services.admission.reserved_bytes,
            ids_bytes=pool.beside_bytes,
        ),
        work=WorkStatus(
            steps=counters.steps,
            prefilled_tokens=counters.prefilled_tokens,
            decoded_tokens=counters.decoded_tokens,
            reused_tokens=counters.reused_tokens,
            waiting_calls=services.driver.waiting,
            waiting_for_memory=services.admission.waiting,
            demotions=services.keeper.demotions,
            promotions=services.keeper.promotions,
            loop_delay_p99_s=services.loop_delay.p99_s(),
            saves=services.journal.saves,
            failed_saves=services.journal.failed_saves,
        ),
        experts=None if facts.experts is None else facts.experts(),
        store_bytes=services.store_size.last(),
        sessions=tuple(session.status(now_s) for session in services.live.values()),
        namespaces=tuple(_namespace_status(account) for account in pool.accounts),
    )


def _namespace_status(account: Account) -> NamespaceStatus:
    quota = account.quota
    return NamespaceStatus(
        namespace=account.namespace,
        sessions=account.sessions,
        live_bytes=account.live_bytes,
        reserved_bytes=account.reserved_bytes,
        waiting=account.waiting,
        quota_bytes=quota.state_bytes,
        quota_sessions=quota.sessions,
        quota_waiting=quota.waiting,
    )
