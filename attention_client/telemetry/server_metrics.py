"""Metrics of the expert servers, exported by clients because the servers have no HTTP endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eaas.types import Member, Role

__all__ = ["ServerMetrics"]

_ASK_S = 0.5


class ServerMetrics(Collector):
    """Metrics of each expert server from its heartbeats, read from the monitor at each scrape.

    Every client exports the same metrics; aggregate with max. Without a monitor, only the last known state of
    a server (up or not) is exported.

    Args:
        ask_members: Returns the members with their loads, or None if the monitor does not answer; takes the
            longest wait in seconds.
        known_members: Returns the last known members.
        placed: Returns the servers of the placement in use.
    """

    def __init__(
        self,
        ask_members: Callable[[float], Mapping[str, Member] | None],
        known_members: Callable[[], Mapping[str, Member]],
        placed: Callable[[], Sequence[str]],
    ) -> None:
        self._ask_members = ask_members
        self._known_members = known_members
        self._placed = placed

    def describe(self) -> list[Metric]:
        """Describe no metrics, so that registering this collector sends no request to the monitor."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Ask the monitor, and yield the current metrics of all expert servers, for one scrape."""
        busy = CounterMetricFamily(
            "eaas_expert_server_busy_seconds",
            "Seconds in which an expert server did not wait for requests",
            labels=["server"],
        )
        experts = GaugeMetricFamily(
            "eaas_expert_server_experts", "Replicas on an expert server", labels=["server"]
        )
        up = GaugeMetricFamily(
            "eaas_expert_server_up",
            "1 for a live expert server, 0 for a dead one that is still in the placement",
            labels=["server"],
        )
        asked = self._ask_members(_ASK_S)
        members = self._known_members() if asked is None else asked
        live = {
            m.id: m
            for m in members.values()
            if m.role is Role.EXPERT_SERVER and not m.state.is_gone
        }
        # Omit servers that left, or whose experts have moved to others.
        for server in sorted(live.keys() | set(self._placed())):
            up.add_metric([server], float(server in live))
        for server, member in live.items() if asked is not None else ():
            busy.add_metric([server], member.busy_s)
            experts.add_metric([server], member.experts)
        yield busy
        yield experts
        yield up
