"""Clusters with slow, hanging or cut-off servers, and clients that make layer calls without a model."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry

from attention_client.cluster import Cluster
from attention_client.telemetry.metrics import ClientMetrics
from eaas.checkpoint import Checkpoint
from eaas.config import AttentionClientConfig
from eaas.errors import EaasError
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.types import MemberState
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, wait_ready
from lone_process import LoneClient
from network_faults import PATIENCE_S, Namespace, Proxy
from waiting import eventually


class Throttle:
    """Control of one `faulty_server`: how slow it computes, and how many batches it began and ended."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(24))
        with path.open("r+b") as file:
            self._control = mmap(file.fileno(), 24)

    def slow(self, seconds_per_expert: float) -> None:
        struct.pack_into("<d", self._control, 0, seconds_per_expert)

    def hang(self) -> None:
        self.slow(math.inf)

    def reset(self) -> None:
        """Full speed and zero counters, before a killed server is restarted."""
        self._control[:] = bytes(24)

    @property
    def batches(self) -> tuple[int, int]:
        """Batches begun and ended."""
        begun, ended = struct.unpack_from("<qq", self._control, 8)
        return begun, ended

    @property
    def computing(self) -> bool:
        begun, ended = self.batches
        return begun > ended


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    """A network namespace; the test is skipped if none can be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        namespace = Namespace()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs root that may make network namespaces: {error.stderr.decode().strip()}")
    yield namespace
    namespace.remove()


class FaultyCluster(LocalCluster):
    """A cluster whose expert servers are `faulty_server`s.

    Attributes:
        options: Options of every expert server.
        ports: Fixed ports, by server.
        proxied: Servers that reach the monitor through a proxy.
        proxies: Those proxies, by server.
        namespaces: Network namespaces, by server.
    """

    options: tuple[str, ...]
    ports: dict[str, int]
    proxied: tuple[str, ...]
    proxies: dict[str, Proxy]
    namespaces: dict[str, Namespace]

    def _spawn(self, name: str, *arguments: str) -> ChildProcess:
        if arguments[0] != "expert-server":
            return super()._spawn(name, *arguments)
        if name in self.proxied:
            proxy = self.proxies[name] = Proxy(self.monitor_address)
            arguments = tuple(proxy.address if a == self.monitor_address else a for a in arguments)
        port = ("--port", str(self.ports[name])) if name in self.ports else ()
        arguments = (*arguments, *self._config_flags, *self.options, *port)
        with pytest.MonkeyPatch.context() as patch:
            if namespace := self.namespaces.get(name):
                arguments = (*arguments, "--host", namespace.server_host, "--insecure")
                patch.setenv("FAULTY_SERVER_NETWORK", namespace.path)
            child = self._faulty(name, arguments)
        self.children[name] = child
        return child

    def restart(self, name: str, timeout_s: float = 60.0) -> None:
        old = self.children[name]
        old.reap(PATIENCE_S)
        child = self._faulty(name, old.arguments)
        self.children[name] = child
        wait_ready([child], timeout_s)

    def _faulty(self, name: str, arguments: Sequence[str]) -> ChildProcess:
        return ChildProcess(
            name, arguments, self.log_dir, module="faulty_server", fork_server=self._fork_server
        )


@pytest.fixture
def throttles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Throttle]:
    """Give the throttle of a server, by its name."""
    directory = tmp_path / "throttles"
    directory.mkdir()
    monkeypatch.setenv("FAULTY_SERVERS", str(directory))
    made: dict[str, Throttle] = {}

    def throttle(name: str) -> Throttle:
        if name not in made:
            made[name] = Throttle(directory / name)
        return made[name]

    return throttle


@pytest.fixture
def faulty_cluster(
    throttles: Callable[[str], Throttle], tmp_path: Path, fork_server: ForkServer
) -> Iterator[Callable[..., FaultyCluster]]:
    """Start clusters of faulty servers; the test is the client."""
    with ExitStack() as stack:

        def start(
            model: Path,
            *,
            options: tuple[str, ...] = (),
            ports: dict[str, int] | None = None,
            proxied: tuple[str, ...] = (),
            namespaces: dict[str, Namespace] | None = None,
            **more: Any,
        ) -> FaultyCluster:
            cluster = FaultyCluster(
                model,
                log_dir=tmp_path / "logs",
                attention_client=False,
                fork_server=fork_server,
                **more,
            )
            cluster.options, cluster.ports = options, ports or {}
            cluster.proxied, cluster.proxies = proxied, {}
            cluster.namespaces = namespaces or {}
            stack.callback(lambda: [proxy.close() for proxy in cluster.proxies.values()])
            stack.callback(cluster.stop)
            cluster.start()
            return cluster

        yield start


class Client:
    """An attention client without a model: it only makes layer calls."""

    def __init__(self, cluster: LocalCluster, **config: Any) -> None:
        shape = Checkpoint.open(cluster.model).shape
        self.metrics = ClientMetrics(CollectorRegistry())
        self.cluster = Cluster(
            cluster.monitor_address, shape, AttentionClientConfig(**config), self.metrics
        )
        self.shape = shape

    def wait(self, servers: int) -> None:
        """Wait until so many servers are connected and every expert is covered."""
        self.cluster.wait_until_covered(PATIENCE_S)
        self.until(lambda: self.cluster.view().usable_S().sum() == servers)

    until = staticmethod(eventually)

    def layer(self, tokens: int = 8, seed: int = 0, layer: int = 0) -> torch.Tensor:
        """Make one layer call; equal arguments make equal calls."""
        dice = torch.Generator().manual_seed(seed)
        x_TH = torch.randn(tokens, self.shape.hidden_size, generator=dice)
        order_TE = torch.rand(tokens, self.shape.num_experts, generator=dice).argsort(dim=1)
        ids_TK = order_TE[:, : self.shape.top_k]
        scores_TK = torch.rand(tokens, self.shape.top_k, generator=dice)
        return self.cluster.layer_call(layer, x_TH, ids_TK, scores_TK, None)

    def count(self, name: str, **labels: str) -> float:
        """The value of a counter."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def join() -> Iterator[Callable[..., Client]]:
    """Make clients that close with the test."""
    with ExitStack() as stack:

        def start(cluster: LocalCluster, servers: int = 3, **config: Any) -> Client:
            client = Client(cluster, **config)
            stack.callback(client.cluster.close)
            if servers:
                client.wait(servers)
            return client

        yield start


@dataclass
class Calls:
    """Results of repeated layer calls of several clients."""

    seconds: list[float] = field(default_factory=list)
    errors: list[EaasError] = field(default_factory=list)
    wrong: int = 0


@pytest.fixture
def calling() -> Callable[..., Any]:
    """Clients call a layer in a loop, one thread each, during the context; every answer must be right."""

    @contextlib.contextmanager
    def call(*clients: Client, pause_s: float = 0.005) -> Iterator[Calls]:
        calls, over = Calls(), threading.Event()
        expected_TH = clients[0].layer()

        def work(client: Client) -> None:
            while not over.wait(pause_s):
                began = time.monotonic()
                try:
                    out_TH = client.layer()
                except EaasError as error:
                    calls.errors.append(error)
                    return
                calls.seconds.append(time.monotonic() - began)
                calls.wrong += not torch.allclose(out_TH, expected_TH, rtol=1e-4, atol=1e-5)

        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        try:
            yield calls
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not calls.errors
        assert not calls.wrong

    return call


class MemberLog:
    """Member events from a monitor's Watch stream, in order.

    Attributes:
        events: Member id, incarnation, state and reason of each event.
        times: When each event arrived.
    """

    def __init__(self, monitor_address: str) -> None:
        self.events: list[tuple[str, int, MemberState, str]] = []
        self.times: list[float] = []
        self._channel = channel(monitor_address)
        self._call = monitor_pb2_grpc.MonitorServiceStub(self._channel).Watch(
            pb.WatchRequest(knows_left=True)
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for response in self._call:
                if response.WhichOneof("kind") == "event":
                    member, reason = response.event.member, response.event.reason
                    state = MemberState.from_number(member.state)
                    self.times.append(time.monotonic())
                    self.events.append((member.id, member.incarnation, state, reason))
        except grpc.RpcError:
            return

    def changes(self, member_id: str) -> list[tuple[MemberState, str]]:
        """States of a member with their reasons.

        A suspicion that ends with the next heartbeat is left out: a busy machine can delay any process by
        half a second.
        """
        found: list[tuple[MemberState, str]] = []
        for name, _, state, reason in tuple(self.events):
            if name != member_id:
                continue
            if found and found[-1][1].startswith("silent for ") and state is not MemberState.DEAD:
                found.pop()
                if reason in ("heard again", "registered again"):
                    continue
            found.append((state, reason))
        if found and found[-1][1].startswith("silent for "):
            found.pop()
        return found

    def states(self, member_id: str) -> list[MemberState]:
        """States of a member (see `changes`) without repeats."""
        states = [state for state, _ in self.changes(member_id)]
        return [s for i, s in enumerate(states) if i == 0 or states[i - 1] is not s]

    def first_time(self, member_id: str, incarnation: int, wanted: MemberState) -> float | None:
        """When an incarnation of a member was first reported in a state."""
        events = zip(tuple(self.events), tuple(self.times), strict=False)
        for (name, number, state, _), at in events:
            if (name, number, state) == (member_id, incarnation, wanted):
                return at
        return None

    def close(self) -> None:
        self._call.cancel()
        self._thread.join(PATIENCE_S)
        self._channel.close()


@pytest.fixture
def watch_members() -> Iterator[Callable[[LocalCluster], MemberLog]]:
    """Record a cluster's member events from now on."""
    with ExitStack() as stack:

        def watch(cluster: LocalCluster) -> MemberLog:
            log = MemberLog(cluster.monitor_address)
            stack.callback(log.close)
            return log

        yield watch


@pytest.fixture
def free_port() -> int:
    """A free port below the kernel's ephemeral range, so that nothing else is given it meanwhile."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


@pytest.fixture
def through_proxies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Clients that connect within the context go through proxies; yields those by server address."""
    from attention_client.connections import opening as connecting

    with ExitStack() as stack:

        @contextlib.contextmanager
        def route() -> Iterator[dict[str, Proxy]]:
            proxies: dict[str, Proxy] = {}
            plain = connecting.open_channel

            def open_channel(address: str, *_peer_and_identity: object) -> grpc.Channel:
                if address not in proxies:
                    proxies[address] = Proxy(address)
                    stack.callback(proxies[address].close)
                return plain(proxies[address].address)

            with monkeypatch.context() as patch:
                patch.setattr(connecting, "open_channel", open_channel)
                yield proxies

        yield route


@pytest.fixture
def lone_client(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., LoneClient]]:
    """Start lone clients, which end with the test."""
    with ExitStack() as stack:

        def start(cluster: Any, transport: str, how: str) -> LoneClient:
            client = LoneClient(cluster, transport, how, tmp_path, fork_server)
            stack.callback(client.end)
            client.wait_for("ready")
            return client

        yield start
