"""What expert servers tell the monitor with their heartbeats, as metrics: they have no HTTP of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eaas.types import Member, Role

__all__ = ["ServerMetrics"]

_ASK_S = 0.5


class ServerMetrics(Collector):
    """Metrics of each expert server, asked for whenever somebody looks.

    Every client shows the same ones: of several, take the largest. Without a monitor there is only whether a
    server is up, as it was heard last.

    Args:
        ask_members: The members with their loads, or None; called with the seconds to wait at most.
        known_members: The members as they were heard of last.
        placed: Servers of the placement in use.
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
        up = GaugeMetricFamily(
            "eaas_expert_server_up",
            "1 for an expert server that lives, 0 for one that is dead and still in the placement",
            labels=["server"],
        )
        asked = self._ask_members(_ASK_S)
        members = self._known_members() if asked is None else asked
        live = {
            m.id: m
            for m in members.values()
            if m.role is Role.EXPERT_SERVER and not m.state.is_gone
        }
        # One that left, or whose experts others have taken over, is nobody's concern any more.
        for server in sorted(live.keys() | set(self._placed())):
            up.add_metric([server], float(server in live))
        for server, member in live.items() if asked is not None else ():
            busy.add_metric([server], member.busy_s)
            experts.add_metric([server], member.experts)
        yield busy
        yield experts
        yield up
