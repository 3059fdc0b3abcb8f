"""HTTP probes of a monitor and a balancer: the same state as their gRPC health, and a stuck monitor."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import pytest

from control_plane import Plane, eventually
from eaas.config import MonitorConfig
from monitor.main import Monitor
from service_box import free_port

pytestmark = pytest.mark.integration


def probe(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_monitor_and_balancer_answer_probes(plane: Plane) -> None:
    ports = free_port(), free_port()
    monitor = plane.monitor(health_port=ports[0])
    balancer = plane.balancer(monitor.address, health_port=ports[1])
    for port in ports:
        assert (probe(port, "/health"), probe(port, "/live")) == (200, 200)
    balancer.stop()
    monitor.stop()
    for port in ports:
        with pytest.raises(urllib.error.URLError):
            probe(port, "/live")


def test_a_stuck_monitor_is_not_alive(plane: Plane) -> None:
    """A probe is answered while the loop is stuck for more than five leases: its state says so."""
    port, naps = free_port(), [0.0]
    config = MonitorConfig(health_port=port, lease_s=0.2, heartbeat_s=0.05)
    monitor = Monitor(config, on_tick=lambda: time.sleep(naps.pop() if naps else 0.0))
    plane.stack.callback(monitor.stop)
    assert probe(port, "/live") == 200
    naps.append(3.0)
    eventually(lambda: probe(port, "/live") == 503)
    eventually(lambda: probe(port, "/live") == 200)
