"""The controller of a cluster on Ray: follows the wanted number of servers, replaces lost actors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from eaas.errors import EaasError
from eaas.log import get_logger
from eaas.membership.monitors import Monitors, ask_members
from eaas.types import Role
from eaas_cli.local.interface import MONITOR
from eaas_cli.local.scaling import Scaler, ScaleWatch
from eaas_cli.ray.cluster import CONTROLLER

if TYPE_CHECKING:
    from eaas_cli.ray.cluster import RayCluster

__all__ = ["Controller"]

_log = get_logger(__name__)
_STEP_S = 0.5
_SCALING_S = 0.1
_POLL_S = 2.0
_ASK_S = 2.0
# Longer than Ray takes to start an actor again.
_MONITOR_S = 30.0


class Controller:
    """Steps a cluster on Ray until the process ends.

    Ray restarts lost actors, on another node if need be. The controller does the rest: it creates and drains
    expert servers for `eaas scale` and `eaas autoscale`, removes servers that have left, and recreates actors
    that Ray gave up. It also recreates a monitor that has not run for 30 s: Ray keeps its actor waiting for
    nodes by their ids, and a machine that replaces a node has another id.

    Args:
        cluster: The cluster, whose actors exist.
        live_servers: Returns the ids of all live expert servers. Raises ClusterError: no monitor answers.
        clock: Monotonic seconds.

    Attributes:
        scaler: Brings the cluster to the wanted number of servers.
    """

    def __init__(
        self,
        cluster: RayCluster,
        live_servers: Callable[[], set[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._live_servers = live_servers or self._ask_monitor
        self._clock = clock
        self._monitor_ran = clock()
        self.scaler = Scaler(cluster, self._started_by_hand)

    def run(self) -> None:
        """Step forever, and follow the balancer's wanted number of servers."""
        self._cluster.pool.adopt()
        watch = ScaleWatch(self._cluster.balancer_address, self.scaler.want, self._cluster.tls)
        try:
            while True:
                try:
                    for line in self.step():
                        _log.info("%s", line)
                except EaasError as error:
                    _log.warning("%s", error)
                time.sleep(_SCALING_S if self.scaler.busy else _STEP_S)
        finally:
            watch.close()

    def step(self) -> list[str]:
        """Poll the actors, replace lost ones and scale by one server, without waiting; return log lines.

        Raises EaasError: an actor cannot be replaced, or a server cannot start or leave.
        """
        cluster, lines = self._cluster, []
        cluster.pool.poll(_POLL_S)
        for name in self._lost():
            cluster.recreate(name)
            lines.append(f"{name} was lost and is created again")
        lines += self.scaler.step()
        for name in cluster.left_servers():
            cluster.forget(name)
            lines.append(f"{name} has left")
        return lines

    def _lost(self) -> list[str]:
        actors, now = self._cluster.pool.actors, self._clock()
        monitor = actors.get(MONITOR)
        if monitor is not None and monitor.report is not None:
            self._monitor_ran = now
        lost = [name for name, actor in actors.items() if actor.lost and name != CONTROLLER]
        if now - self._monitor_ran >= _MONITOR_S:
            self._monitor_ran = now
            return [MONITOR, *(name for name in lost if name != MONITOR)]
        return lost

    def _started_by_hand(self) -> set[str]:
        own = {server.name for server in self._cluster.running_servers()}
        return self._live_servers() - own

    def _ask_monitor(self) -> set[str]:
        monitors = Monitors(self._cluster.monitor_address, self._cluster.tls)
        try:
            members = ask_members(monitors, _ASK_S)
        finally:
            monitors.close()
        return {m.id for m in members if m.role is Role.EXPERT_SERVER and not m.state.is_gone}
