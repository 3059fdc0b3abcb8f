"""Monitor and balancer as processes: health, HTTP probes, signals, shutdown."""

from __future__ import annotations

import signal
import socket
import time
import urllib.error
import urllib.request

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane import (
    LEFT,
    PATIENCE_S,
    SERVING,
    Plane,
    eventually,
    has_state,
    monitor_process,
    start_process,
)
from eaas.config import MonitorConfig
from eaas.net.grpc_client import channel
from monitor.main import Monitor
from service_box import free_port

pytestmark = pytest.mark.integration


BALANCER = """
import sys
from balancer.main import run
from eaas.config import BalancerConfig
run(BalancerConfig(), sys.argv[1], lambda address: print(address, flush=True))
"""


def test_health_of_the_processes_and_their_end(plane: Plane) -> None:
    monitor, monitor_address = monitor_process(plane.stack, stop_members_on_exit=True)
    balancer, balancer_address = start_process(plane.stack, BALANCER, monitor_address)
    services = {
        monitor_address: "eaas.rpc.v1.MonitorService",
        balancer_address: "eaas.rpc.v1.BalancerService",
    }
    for address, service in services.items():
        with channel(address) as line:
            stub = health_pb2_grpc.HealthStub(line)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    observer = plane.observe(monitor_address)
    observer.wait(has_state("balancer", SERVING))
    monitor.send_signal(signal.SIGTERM)
    assert monitor.wait(PATIENCE_S) == 0
    assert balancer.wait(PATIENCE_S) == 0
    assert observer.stopping.wait(PATIENCE_S)


def test_sigterm_ends_a_balancer_with_a_goodbye(plane: Plane) -> None:
    monitor = plane.monitor(lease_s=60.0)
    observer = plane.observe(monitor.address)
    balancer, _ = start_process(plane.stack, BALANCER, monitor.address)
    observer.wait(has_state("balancer", SERVING))
    balancer.send_signal(signal.SIGTERM)
    assert balancer.wait(PATIENCE_S) == 0
    observer.wait(has_state("balancer", LEFT))


def test_a_signal_ends_a_balancer_that_waits_for_the_monitor(plane: Plane) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        program = "print('starting', flush=True)\n" + BALANCER
        balancer, _ = start_process(plane.stack, program, address)
        silent.settimeout(PATIENCE_S)
        connection, _ = silent.accept()
        with connection:
            balancer.send_signal(signal.SIGTERM)
            assert balancer.wait(2.0) == -signal.SIGTERM


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
