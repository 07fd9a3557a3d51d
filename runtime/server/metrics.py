"""Figures for Prometheus, in a registry of the server's own."""

from collections.abc import Callable
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serai.runtime.server.asking import Usage
from serai.runtime.status import Status

StatusSource: TypeAlias = Callable[[], tuple[Status, dict[str, float]]]
"""Gives the runtime's status and further gauges."""

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """Counted where things happen."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "serai_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.prompt_tokens = Counter("serai_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.cached_tokens = Counter("serai_cached_tokens", "Of those, not computed again.", registry=self.registry)
        self.output_tokens = Counter("serai_output_tokens", "Tokens of replies.", registry=self.registry)
        self.first_s = Histogram(
            "serai_first_token_seconds", "From a request to its first token.", buckets=BUCKETS_S, registry=self.registry
        )

    def count(self, usage: Usage) -> None:
        """A request is done."""
        self.prompt_tokens.inc(usage.prompt)
        self.cached_tokens.inc(usage.cached)
        self.output_tokens.inc(usage.output)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class StatusCollector(Collector):
    """The runtime's status as gauges, read when asked for."""

    def __init__(self, status: StatusSource) -> None:
        self._status = status

    def collect(self) -> list[Metric]:
        status, gauges = self._status()
        work, budget = status.work, status.budget
        counters = {
            "serai_steps": work.steps,
            "serai_prefilled_tokens": work.prefilled_tokens,
            "serai_decoded_tokens": work.decoded_tokens,
            "serai_reused_tokens": work.reused_tokens,
            "serai_demotions": work.demotions,
            "serai_promotions": work.promotions,
            "serai_saves": work.saves,
            "serai_failed_saves": work.failed_saves,
        }
        sizes = {
            "serai_budget_bytes": budget.budget_bytes,
            "serai_trunk_bytes": budget.trunk_bytes,
            "serai_expert_bytes": budget.expert_bytes,
            "serai_scratch_bytes": budget.scratch_bytes,
            "serai_live_bytes": budget.live_bytes,
            "serai_kept_bytes": budget.kept_bytes,
            "serai_spare_bytes": budget.spare_bytes,
            "serai_reserved_bytes": budget.reserved_bytes,
            "serai_calls_waiting_for_steps": work.waiting_calls,
            "serai_calls_waiting_for_memory": work.waiting_for_memory,
            "serai_loop_delay_p99_seconds": work.loop_delay_p99_s,
            "serai_sessions": len(status.sessions),
            **gauges,
        }
        return [
            *(CounterMetricFamily(name, _said(name), value=value) for name, value in counters.items()),
            *(GaugeMetricFamily(name, _said(name), value=value) for name, value in sizes.items()),
        ]


def _said(name: str) -> str:
    return name.removeprefix("serai_").replace("_", " ").capitalize() + "."
