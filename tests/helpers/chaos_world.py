"""Clusters with slow, hanging or cut-off servers, and clients that make layer calls without a model."""

from __future__ import annotations

import contextlib
import math
import signal
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import yaml
from prometheus_client import CollectorRegistry

from attention_client.cluster import Cluster
from attention_client.connections import opening
from attention_client.connections.connection import Connection
from attention_client.telemetry.metrics import ClientMetrics
from eaas.checkpoint import Checkpoint
from eaas.config import AttentionClientConfig, load_config
from eaas.errors import EaasError
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.types import MemberState
from eaas_cli.chaos.network import Namespace
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready
from faulty_server import DIRECTORY, LAYOUT, NETWORK, open_control
from lone_client import ID
from network_faults import PATIENCE_S, Proxy
from waiting import eventually

__all__ = [
    "ChaosWorld",
    "Client",
    "CutOffCluster",
    "FaultyCluster",
    "LoneClient",
    "MemberLog",
    "Throttle",
    "same",
]


def same(out_TH: torch.Tensor, expected_TH: torch.Tensor) -> bool:
    """Equal up to fp32 rounding: a replica groups the experts differently."""
    return torch.allclose(out_TH, expected_TH, rtol=1e-4, atol=1e-5)


class Throttle:
    """Control of one `faulty_server`: how slow it computes, and how many batches it began and ended."""

    def __init__(self, path: Path) -> None:
        self._control = open_control(path)

    def slow(self, seconds_per_expert: float) -> None:
        struct.pack_into("<d", self._control, 0, seconds_per_expert)

    def hang(self) -> None:
        self.slow(math.inf)

    def reset(self) -> None:
        """Full speed and zero counters, before a killed server is restarted."""
        self._control[:] = bytes(LAYOUT.size)

    @property
    def batches(self) -> tuple[int, int]:
        """Batches begun and ended."""
        _, begun, ended = LAYOUT.unpack_from(self._control)
        return begun, ended

    @property
    def computing(self) -> bool:
        begun, ended = self.batches
        return begun > ended


class CutOffCluster(LocalCluster):
    """A cluster in which some processes reach the monitor through proxies.

    Args:
        cut_off: The names of these processes.

    Attributes:
        proxies: By the names of the processes.
    """

    def __init__(self, model: Path, *, cut_off: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(model, **options)
        self.proxies: dict[str, Proxy] = {}
        self._cut_off = cut_off

    def _spawn(self, name: str, *arguments: str) -> ChildProcess:
        return super()._spawn(name, *self._through_proxy(name, arguments))

    def _through_proxy(self, name: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
        if name not in self._cut_off:
            return arguments
        proxy = self.proxies[name] = Proxy(self.monitor_address)
        return tuple(proxy.address if a == self.monitor_address else a for a in arguments)

    def stop(self) -> None:
        super().stop()
        for proxy in self.proxies.values():
            proxy.close()


class FaultyCluster(CutOffCluster):
    """A cluster whose expert servers are `faulty_server`s.

    Args:
        options: Options of every expert server.
        ports: Fixed ports, by server.
        namespaces: Network namespaces, by server.
    """

    def __init__(
        self,
        model: Path,
        *,
        options: tuple[str, ...] = (),
        ports: dict[str, int] | None = None,
        namespaces: dict[str, Namespace] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, clients=0, **more)
        self._options, self._ports = options, ports or {}
        self._namespaces = namespaces or {}

    def _spawn(self, name: str, *arguments: str) -> ChildProcess:
        if arguments[0] != "expert-server":
            return super()._spawn(name, *arguments)
        arguments = self._through_proxy(name, arguments)
        port = ("--port", str(self._ports[name])) if name in self._ports else ()
        arguments = (*arguments, *self._config_flags, *self._options, *port)
        with pytest.MonkeyPatch.context() as patch:
            if namespace := self._namespaces.get(name):
                arguments = (*arguments, "--host", namespace.server_host, "--insecure")
                patch.setenv(NETWORK, namespace.path)
            return self._faulty(name, arguments)

    def restart(self, name: str, timeout_s: float = 60.0) -> None:
        old = self.children[name]
        old.reap(PATIENCE_S)
        wait_ready([self._faulty(name, old.arguments)], timeout_s)

    def _faulty(self, name: str, arguments: Sequence[str]) -> ChildProcess:
        child = self.children[name] = ChildProcess(
            name, arguments, self.log_dir, module="faulty_server", fork_server=self._fork_server
        )
        return child


class Client:
    """An attention client without a model: it only makes layer calls."""

    def __init__(self, cluster: Any, **config: Any) -> None:
        self.shape = Checkpoint.open(cluster.model).shape
        self.metrics = ClientMetrics(CollectorRegistry())
        self.cluster = Cluster(
            cluster.monitor_address, self.shape, AttentionClientConfig(**config), self.metrics
        )

    def wait(self, servers: int) -> None:
        """Wait until so many servers are connected and every expert is covered."""
        self.cluster.wait_until_covered(PATIENCE_S)
        self.until(lambda: self.cluster.view().usable_S().sum() == servers)

    until = staticmethod(eventually)

    def layer(self, tokens: int = 8, seed: int = 0, layer: int = 0) -> torch.Tensor:
        """Make one layer call; equal arguments make equal calls."""
        return self.cluster.layer_call(layer, *self.draw(tokens, seed), None)

    def draw(self, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, expert ids and scores for a layer call."""
        dice = torch.Generator().manual_seed(seed)
        x_TH = torch.randn(tokens, self.shape.hidden_size, generator=dice)
        order_TE = torch.rand(tokens, self.shape.num_experts, generator=dice).argsort(dim=1)
        scores_TK = torch.rand(tokens, self.shape.top_k, generator=dice)
        return x_TH, order_TE[:, : self.shape.top_k], scores_TK

    def connection(self, server: str) -> Connection:
        """The current connection to a server."""
        return next(
            c for c in self.cluster.view().connections if c is not None and c.server_id == server
        )

    def count(self, name: str, **labels: str) -> float:
        """The value of a counter."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def requests(self) -> int:
        """Requests that have ended."""
        self.count("eaas_layer_calls_total")  # Compiled calls are counted when metrics are read.
        return sum(s.answered + s.timed_out + s.hedged_away for s in self.metrics.outcomes.read())

    def failovers(self, *reasons: str) -> float:
        return sum(self.count("eaas_failovers_total", reason=reason) for reason in reasons)

    def hedges(self) -> float:
        """Hedges sent."""
        outcomes = ("won", "lost", "failed")
        return sum(self.count("eaas_hedges_total", outcome=outcome) for outcome in outcomes)

    def failures_of(self, server: str) -> int:
        """Failures since the server's last answer."""
        told = self.metrics.outcomes.read()
        return sum(s.failures_since_answer for s in told if s.server_id == server)


@dataclass
class Calls:
    """Results of repeated layer calls of several clients."""

    seconds: list[float] = field(default_factory=list)
    errors: list[EaasError] = field(default_factory=list)
    wrong: int = 0

    def wait_more(self, number: int) -> None:
        """Wait until so many more calls have ended."""
        wanted = len(self.seconds) + number
        eventually(lambda: self.errors or len(self.seconds) >= wanted)


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
            pb.WatchRequest(knows_left=True, knows_frontends=True)
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for response in self._call:
                if response.WhichOneof("kind") == "event":
                    member, reason = response.event.member, response.event.reason
                    state = MemberState.from_number(member.state)
                    self.times.append(time.monotonic())
                    self.events.append((member.id, member.incarnation, state, reason))

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


class LoneClient(ChildProcess):
    """A `lone_client` process, which a test can stop or kill."""

    def __init__(
        self, cluster: LocalCluster, transport: str, how: str, log_dir: Path, forks: ForkServer
    ) -> None:
        arguments = (cluster.monitor_address, str(cluster.model), transport, how)
        super().__init__(ID, arguments, log_dir, module="lone_client", fork_server=forks)
        self._said = log_dir / f"{ID}.log"

    def wait_for(self, word: str) -> None:
        eventually(lambda: word in self._said.read_text() or not self.running, what=word)
        assert self.running, self.last_words()

    @property
    def answers(self) -> int:
        return self._said.read_text().count("answer\n")

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.reap(PATIENCE_S)


class ChaosWorld:
    """Starts clusters, clients and observers that end with the test.

    Args:
        stack: Ends them.
        model: Checkpoint of the clusters.
        directory: For settings, logs and controls.
        fork_server: Forks the processes.
    """

    def __init__(
        self, stack: ExitStack, model: Path, directory: Path, fork_server: ForkServer
    ) -> None:
        self._stack, self.model, self._directory = stack, model, directory
        self.fork_server = fork_server
        (directory / "throttles").mkdir()
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(
            DIRECTORY, str(directory / "throttles")
        )
        self._throttles: dict[str, Throttle] = {}

    def start(
        self, *, model: Path | None = None, settings: dict[str, Any] | None = None, **options: Any
    ) -> FaultyCluster:
        """Start a cluster of faulty servers; the test is the client.

        Args:
            model: Another checkpoint.
            settings: Of `cluster.yaml`.
            options: Of `FaultyCluster`.
        """
        if settings:
            file = self._directory / "cluster.yaml"
            file.write_text(yaml.safe_dump(settings))
            options |= {"config_file": file, "config": load_config(file)}
        cluster = FaultyCluster(
            model or self.model,
            log_dir=self._directory / "logs",
            fork_server=self.fork_server,
            **options,
        )
        self._stack.callback(cluster.stop)
        cluster.start()
        return cluster

    def throttle(self, server: str) -> Throttle:
        if server not in self._throttles:
            self._throttles[server] = Throttle(self._directory / "throttles" / server)
        return self._throttles[server]

    def join(self, cluster: Any, servers: int = 3, **config: Any) -> Client:
        """Start a client, and wait until it is connected to so many servers."""
        client = Client(cluster, **config)
        self._stack.callback(client.cluster.close)
        if servers:
            client.wait(servers)
        return client

    @staticmethod
    @contextlib.contextmanager
    def calling(*clients: Client) -> Iterator[Calls]:
        """Clients call a layer in a loop, one thread each, during the context; every answer must be right."""
        calls, over = Calls(), threading.Event()
        expected_TH = clients[0].layer()

        def work(client: Client) -> None:
            while not over.wait(0.005):
                began = time.monotonic()
                try:
                    out_TH = client.layer()
                except EaasError as error:
                    calls.errors.append(error)
                    return
                calls.seconds.append(time.monotonic() - began)
                calls.wrong += not same(out_TH, expected_TH)

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

    def watch(self, cluster: LocalCluster) -> MemberLog:
        """Record a cluster's member events from now on."""
        log = MemberLog(cluster.monitor_address)
        self._stack.callback(log.close)
        return log

    @contextlib.contextmanager
    def through_proxies(self) -> Iterator[dict[str, Proxy]]:
        """Clients that connect within the context go through proxies; yields those by server address."""
        proxies: dict[str, Proxy] = {}
        plain = opening.open_channel

        def open_channel(address: str, *_peer_and_identity: object) -> grpc.Channel:
            if address not in proxies:
                proxies[address] = Proxy(address)
                self._stack.callback(proxies[address].close)
            return plain(proxies[address].address)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opening, "open_channel", open_channel)
            yield proxies

    def child(self, name: str, *words: str) -> ChildProcess:
        """Start a role as an operator does."""
        child = ChildProcess(name, words, None, fork_server=self.fork_server)
        self._stack.callback(stop_all, [child], at_once=True)
        return child

    def by_hand(self, cluster: Any, name: str, model: Path | None) -> ChildProcess:
        """Start an expert server as an operator does, with or without its own checkpoint."""
        words = ("--model", str(model)) if model else ()
        return self.child(
            name, "expert-server", "--id", name, "--join", cluster.monitor_address, *words
        )

    def lone_client(self, cluster: LocalCluster, transport: str, how: str) -> LoneClient:
        client = LoneClient(cluster, transport, how, self._directory, self.fork_server)
        self._stack.callback(client.end)
        client.wait_for("ready")
        return client
