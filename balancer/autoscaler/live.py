"""The autoscaler of a running cluster (`eaas autoscale`): takes readings, sends decisions to the balancer.

    monitor: members, how busy each server was ----+
    endpoints, /metrics: time between two tokens --+--> Autoscaler --> balancer: Scale --> who starts servers
    balancer: fewest possible servers -------------+

The autoscaler is not a cluster member and keeps no state that others need: it may stop and start at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from balancer.autoscaler.core import Autoscaler, Reading
from balancer.autoscaler.meters import LatencyMeter, Utilizations, token_times
from eaas.config import AutoscalerConfig
from eaas.control_plane.balancer_client import BalancerClient
from eaas.errors import ClusterError, ConfigError
from eaas.membership.monitors import Monitors, ask_members
from eaas.net.tls import Identity
from eaas.types import Member, MemberState, Role

__all__ = ["LiveAutoscaler"]

_CALL_S = 5.0

_COMING_OR_GOING = (MemberState.JOINING, MemberState.DRAINING)


class LiveAutoscaler:
    """Measures a running cluster, decides the number of servers, and scales the cluster.

    Args:
        config: The autoscaler's settings.
        monitor_address: host:port of the monitor, or several, separated by commas.
        dry_run: Decide, but change nothing.
        clock: Monotonic seconds.
        tls: This process's identity; None: plain text.

    Raises:
        ConfigError: min_servers is above max_servers.
    """

    def __init__(
        self,
        config: AutoscalerConfig,
        monitor_address: str,
        dry_run: bool = False,
        clock: Callable[[], float] = time.monotonic,
        tls: Identity | None = None,
    ) -> None:
        self._tls = tls
        try:
            self._autoscaler = Autoscaler(config)
        except ValueError as error:
            raise ConfigError(f"autoscaler: {error}") from error
        self._dry_run = dry_run
        self._clock = clock
        self._utilizations = Utilizations()
        self._latency = LatencyMeter()
        self._monitors = Monitors(monitor_address, tls)

    def close(self) -> None:
        """Close the connections to the monitors. Idempotent."""
        self._monitors.close()

    def look(self) -> str:
        """Measure, decide and ask the balancer to scale, once; `eaas autoscale` calls it each `interval_s`.

        Returns:
            Measurements, decision and reason, for people.

        Raises:
            ClusterError: The monitor or the balancer does not answer, or refuses to scale.
        """
        members = ask_members(self._monitors, _CALL_S)
        with BalancerClient(_balancer(members), self._tls) as client:
            fewest = client.scale_state().fewest
            decision = self._autoscaler.decide(self._read(members, fewest))
            if decision.servers == decision.before:
                return str(decision)
            if self._dry_run:
                return f"{decision} (nothing is done: this is a dry run)"
            client.scale(decision.servers)
        self._autoscaler.changed(decision, self._clock())
        return str(decision)

    def _read(self, members: list[Member], fewest: int) -> Reading:
        now = self._clock()
        servers = [m for m in members if m.role is Role.EXPERT_SERVER]
        alive = [m for m in servers if not m.state.is_gone]
        counted = [m.id for m in alive if m.state is not MemberState.DRAINING]
        shares = self._utilizations.read(alive, now)
        changing = [f"{m.id} is {m.state.value}" for m in alive if m.state in _COMING_OR_GOING]
        return Reading(
            now=now,
            servers=len(counted),
            work=sum(shares.values()),
            unmeasured=sum(server not in shares for server in counted),
            busiest=max(shares.values(), default=0.0),
            fewest=fewest,
            token_s=self._latency.read(token_times(members)),
            changing=", ".join(changing),
        )


def _balancer(members: Iterable[Member]) -> str:
    for member in members:
        if member.role is Role.BALANCER and not member.state.is_gone:
            return member.address
    raise ClusterError("no balancer lives in this cluster: start one with `eaas balancer --join`")
