"""The autoscaler with a real monitor and balancer, and fake expert servers."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from balancer.autoscaler.live import LiveAutoscaler
from control_plane import SERVING, MetricsServer, Plane, eventually
from eaas.config import AutoscalerConfig
from eaas.control_plane.balancer_client import BalancerClient
from eaas.errors import ClusterError, ConfigError
from eaas_cli.chaos.cluster import free_port
from eaas_cli.local.scaling import ScaleWatch
from frontend.metrics import ServeMetrics

pytestmark = pytest.mark.integration

BUSY, IDLE = 0.95, 0.0


class Cluster:
    """Two servers, the minimum for the redundancy, and a launcher that records wanted sizes."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self.address = plane.monitor(lease_s=5.0, heartbeat_s=0.1).address
        self.balancer = plane.balancer(self.address)
        self.wanted: list[int] = []
        self.servers = [plane.server(self.address, f"s{n}") for n in range(2)]
        eventually(lambda: all(s.state is SERVING for s in self.servers))

    def launch(self) -> None:
        """Connect a launcher that starts servers."""
        watch = ScaleWatch(
            lambda: self.balancer.address, lambda servers, _wish: self.wanted.append(servers)
        )
        self._plane.stack.callback(watch.close)

        def accepts() -> bool:
            with contextlib.suppress(ClusterError):
                client.scale(len(self.servers))
                return True
            return False

        with BalancerClient(self.balancer.address) as client:
            eventually(accepts)
        eventually(lambda: self.wanted)
        self.wanted.clear()

    def start(self) -> None:
        self.servers.append(self._plane.server(self.address, f"s{len(self.servers)}"))
        eventually(lambda: self.servers[-1].state is SERVING)

    def end_last(self) -> None:
        self.servers.pop().close()

    def work(self, busy: float) -> None:
        for server in self.servers:
            server.busy = busy

    def autoscaler(self, dry_run: bool = False, **fields: Any) -> LiveAutoscaler:
        config = AutoscalerConfig(**({"cooldown_s": 0.1, "scale_in_window_s": 1.0} | fields))
        autoscaler = LiveAutoscaler(config, self.address, dry_run)
        self._plane.stack.callback(autoscaler.close)
        return autoscaler


@pytest.fixture
def cluster(plane: Plane) -> Cluster:
    return Cluster(plane)


def look_until(autoscaler: LiveAutoscaler, said: str) -> str:
    # Time for a heartbeat with the servers' new load.
    def looked() -> str:
        time.sleep(0.3)
        return line if said in (line := autoscaler.look()) else ""

    return eventually(looked, what=said)


def test_a_server_comes_with_work_and_goes_without(cluster: Cluster) -> None:
    cluster.launch()
    autoscaler = cluster.autoscaler(max_servers=3)
    assert autoscaler.look() == "servers: 2: no server was measured; nothing to go by"
    cluster.work(BUSY)
    dry = look_until(cluster.autoscaler(dry_run=True), "2 -> 3")
    assert dry.endswith("(nothing is done: this is a dry run)")
    assert cluster.wanted == []
    line = look_until(autoscaler, "2 -> 3")
    assert "to be busy 60 % takes " in line
    look_until(autoscaler, "waits: 3 servers were asked for")
    eventually(lambda: cluster.wanted == [3])
    cluster.start()
    cluster.work(0.55)
    look_until(autoscaler, "as many as are right")
    cluster.work(IDLE)
    look_until(autoscaler, "3 -> 2")
    eventually(lambda: cluster.wanted == [3, 2])
    cluster.end_last()
    line = look_until(autoscaler, "but every expert's replicas need 2")
    assert line.startswith("servers: 2: busy 0 %")
    assert cluster.wanted == [3, 2]


def test_latency_comes_from_the_endpoints(cluster: Cluster, plane: Plane) -> None:
    registry = CollectorRegistry()
    metrics = ServeMetrics(registry)
    # The autoscaler reads the names that both engines have.
    metrics.watch(MagicMock(capacity=None), "demo")
    latency = metrics.inter_token_latency
    endpoint = MetricsServer(lambda: generate_latest(registry))
    plane.client(cluster.address, endpoint.address)
    autoscaler = cluster.autoscaler(dry_run=True, latency_target_ms=50)
    cluster.work(0.6)
    latency.observe(10.0)
    assert "a token" not in autoscaler.look()
    time.sleep(0.5)
    for seconds in (0.05, 0.07, 0.09):
        latency.observe(seconds)
    line = autoscaler.look()
    assert "70 ms a token; a token takes longer than 50 ms" in line
    # An endpoint that does not answer is left out.
    endpoint.close()
    assert "a token" not in autoscaler.look()


def test_without_a_launcher_scaling_is_an_error(cluster: Cluster) -> None:
    autoscaler = cluster.autoscaler(cooldown_s=3600)
    cluster.work(BUSY)
    with pytest.raises(ClusterError, match="nobody starts servers for this cluster"):
        look_until(autoscaler, "2 -> 3")
    # A refused change does not start a cooldown.
    cluster.launch()
    look_until(autoscaler, "2 -> 3")


def test_a_missing_monitor_or_balancer_is_named(plane: Plane) -> None:
    config = AutoscalerConfig()
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    alone = LiveAutoscaler(config, address)
    plane.stack.callback(alone.close)
    with pytest.raises(ClusterError, match=f"the monitor at {address} does not answer: .*; check"):
        alone.look()
    no_balancer = LiveAutoscaler(config, plane.monitor().address)
    plane.stack.callback(no_balancer.close)
    with pytest.raises(ClusterError, match="no balancer lives in this cluster"):
        no_balancer.look()
    with pytest.raises(ConfigError, match="autoscaler: min_servers 9 is above max_servers 8"):
        LiveAutoscaler(AutoscalerConfig(min_servers=9), address)
