"""Monitor and balancer as processes: health, signals, shutdown."""

from __future__ import annotations

import signal
import socket

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane import (
    LEFT,
    PATIENCE_S,
    SERVING,
    Plane,
    has_state,
    monitor_process,
    start_process,
)
from eaas.net.grpc_client import channel

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
