"""HTTP probes of a monitor and a balancer: the same state as their gRPC health, and a stuck monitor."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import pytest

from control_plane import Plane, eventually
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
    balancer._server.set_serving(False)
    assert (probe(ports[1], "/health"), probe(ports[1], "/live")) == (503, 200)
    balancer.stop()
    monitor.stop()
    for port in ports:
        with pytest.raises(urllib.error.URLError):
            probe(port, "/live")


def test_a_stuck_monitor_is_not_alive(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe is answered while the loop is stuck: its state says so."""
    monkeypatch.setattr("monitor.main._STUCK_S", 1.0)
    port = free_port()
    monitor = plane.monitor(health_port=port)
    assert probe(port, "/live") == 200
    monitor._server.loop.call_soon_threadsafe(time.sleep, 3.0)
    eventually(lambda: probe(port, "/live") == 503)
    eventually(lambda: probe(port, "/live") == 200)
