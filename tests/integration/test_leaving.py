"""Processes that leave: running requests end. Servers that join: their probes say when they are ready."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from control_plane import Plane, eventually
from eaas.config import load_config
from eaas.errors import EaasError
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import common_pb2, expert_pb2, expert_pb2_grpc
from eaas.types import MemberState
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, wait_ready

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BODY = {
    "prompt": "Hello",
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def stream_through(url: str, then: Callable[[], None]) -> list[str]:
    """Read a whole answer; call `then` after its first events."""
    events: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line)
                if len(events) == 3:
                    then()
    return events


@pytest.fixture
def cluster(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> LocalCluster:
    # An answer takes several seconds, longer than a frontend that ends at once waits.
    file = tmp_path / "slow.yaml"
    file.write_text("frontend: {port: 0}\nexpert_server: {added_latency_us: 5000}")
    return start_cluster(
        checkpoint(), servers=1, redundancy=1, config=load_config(file), config_file=file
    )


def test_a_frontend_finishes_its_requests(cluster: LocalCluster) -> None:
    frontend = cluster.children["frontend"]
    host, port = cluster.endpoint.removeprefix("http://").split(":")
    refused = threading.Event()

    def leave() -> None:
        frontend.signal(signal.SIGTERM)

        def is_closed() -> bool:
            try:
                socket.create_connection((host, int(port)), timeout=5).close()
            except ConnectionRefusedError:
                refused.set()
            return refused.is_set()

        # Nobody connects any more while the answer goes on.
        eventually(is_closed)

    events = stream_through(cluster.endpoint, leave)
    assert refused.is_set()
    assert events[-1] == "data: [DONE]"
    assert '"completion_tokens":400' in events[-2].replace(" ", "")
    assert frontend.reap(20)
    assert frontend.process.returncode == 0


def test_a_second_signal_ends_a_frontend_at_once(cluster: LocalCluster) -> None:
    frontend = cluster.children["frontend"]

    def leave_now() -> None:
        os.kill(frontend.pid, signal.SIGINT)
        os.kill(frontend.pid, signal.SIGTERM)

    began = time.monotonic()
    events = stream_through(cluster.endpoint, leave_now)
    assert any("stopping" in event for event in events[-2:])
    assert frontend.reap(20)
    assert time.monotonic() - began < 15


def probe(port: int, path: str) -> int:
    """Status of a probe; 0: nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionRefusedError:
        return 0
    finally:
        connection.close()


def test_an_expert_server_is_ready_once_moves_are_over(
    checkpoint: Callable[..., Path],
    plane: Plane,
    cleanup: ExitStack,
    tmp_path: Path,
    fork_server: ForkServer,
) -> None:
    """Not as soon as it serves: a rolling update or `kubectl drain` would stop the next server too early."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "cluster.yaml"
    config.write_text(f"expert_server: {{health_port: {port}}}")
    address = plane.monitor().address
    observer = plane.observe(address)
    arguments = ["expert-server", "--id", "s", "--join", address, "--model", str(checkpoint())]
    arguments += ["--config", str(config)]
    child = ChildProcess("s", arguments, tmp_path, fork_server=fork_server)
    cleanup.callback(child.reap, 10)
    cleanup.callback(child.signal, signal.SIGKILL)
    view = observer.wait(lambda view: "s" in view.members)
    assert (probe(port, "/live"), probe(port, "/health")) == (200, 503)
    member = view.members["s"]
    assert member.model is not None
    layers = [common_pb2.Holding(experts=[0], shares=[1.0])] * member.model.num_layers
    with channel(member.address) as line:
        stub = expert_pb2_grpc.ExpertServiceStub(line)
        stub.PreparePlacement(
            expert_pb2.PreparePlacementRequest(epoch=1, layers=layers), timeout=30
        )
        wait_ready([child], 30)
        observer.wait(lambda view: view.members["s"].state is MemberState.SERVING)
        assert probe(port, "/health") == 503
        stub.RetirePlacement(expert_pb2.RetirePlacementRequest(epoch=1, layers=layers), timeout=30)
        assert probe(port, "/health") == 200
    child.signal(signal.SIGTERM)
    assert child.reap(20)
    assert probe(port, "/live") == 0


def test_a_taken_health_port_is_an_error(
    plane: Plane, tmp_path: Path, cleanup: ExitStack, fork_server: ForkServer
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for role in ("monitor", "balancer"):
            config = tmp_path / "cluster.yaml"
            config.write_text(f"{role}: {{health_port: {port}}}")
            join = [] if role == "monitor" else ["--join", plane.monitor().address]
            arguments = [role, *join, "--config", str(config)]
            child = ChildProcess(role, arguments, tmp_path, fork_server=fork_server)
            cleanup.callback(child.reap, 10)
            cleanup.callback(child.signal, signal.SIGKILL)
            with pytest.raises(EaasError, match=f"{port} is in use"):
                wait_ready([child], 30)
