"""What expert servers tell the monitor with their heartbeats, as metrics: they have no HTTP of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eaas.types import Member, MemberState, Role

__all__ = ["ServerMetrics"]

_ASK_S = 0.5


class ServerMetrics(Collector):
    """Two metrics of each live expert server, asked for whenever somebody looks.

    Every client shows the same ones: of several, take the largest. Without a monitor there are none.

    Args:
        ask_members: The members with their loads, or None; called with the seconds to wait at most.
    """

    def __init__(self, ask_members: Callable[[float], Mapping[str, Member] | None]) -> None:
        self._ask_members = ask_members

    def describe(self) -> list[Metric]:
        """Nothing: registering it is to ask nobody."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        busy = CounterMetricFamily(
            "eaas_expert_server_busy_seconds",
            "Seconds for which an expert server did not wait for requests",
            labels=["server"],
        )
        experts = GaugeMetricFamily(
            "eaas_expert_server_experts", "Replicas that an expert server holds", labels=["server"]
        )
        for member in (self._ask_members(_ASK_S) or {}).values():
            if member.role is Role.EXPERT_SERVER and member.state is not MemberState.DEAD:
                busy.add_metric([member.id], member.busy_s)
                experts.add_metric([member.id], member.experts)
        yield busy
        yield experts
