"""A client of each transport in turn, and servers for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from eaas.one_sided import why_not
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, wait_ready
from installed_package import install
from transport_bench import (
    LARGE,
    PATIENCE_S,
    SLOTS,
    Client,
    Server,
    end,
    eventually,
    segments_mapped,
    threads,
)

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a package with transport `tcp` is installed."""
    folder = tmp_path_factory.mktemp("installed")
    with pytest.MonkeyPatch.context() as patch:
        install(folder, patch, "eaas.transports", "tcp_transport", {"tcp": "TCP"})
        yield str(folder)


@pytest.fixture(params=["shm", "grpc", "tcp", NIXL])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    torch.set_num_threads(1)
    client = Client(request.param)
    yield client
    for connection in client.connections:
        connection.close()
    eventually(lambda: not threads("grpc-link", "tcp-link", "nixl-link", "joined"))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def leaves_nothing(server: Server) -> Callable[[Callable[[], object], int], None]:
    """Opens and closes connections again and again; no file, memory, thread or slot may be left."""

    def held() -> tuple[int, int, int]:
        eventually(
            lambda: not threads("grpc-link", "nixl-link", "joined", "exchange", "process-ended")
        )
        # gRPC keeps its workers, up to a number.
        own = [t for t in threading.enumerate() if not t.name.startswith("grpc_")]
        return len(os.listdir("/proc/self/fd")), segments_mapped(), len(own)

    def check(one_more: Callable[[], object], times: int) -> None:
        for _ in range(5):  # What is made once for a process.
            one_more()
        before = held()
        for _ in range(times):
            one_more()
        # gRPC lets go of sockets a little later.
        eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        assert not server.table.clients()
        # All slots can be had again, in one piece.
        eventually(lambda: server.table.grant("everything", 1, SLOTS))

    return check


@pytest.fixture
def idle_server() -> Iterator[Server]:
    """Its loop does not run."""
    server = Server(run=False)
    yield server
    server.close()


@pytest.fixture
def large_server() -> Iterator[Server]:
    """A slot takes 3 MiB one way and 2 MiB the other."""
    server = Server(slots=4, tokens=LARGE)
    yield server
    server.close()


@pytest.fixture
def start(fork_server: ForkServer, installed: str) -> Iterator[Callable[..., ChildProcess]]:
    """Starts this suite's helper as a process of its own, and waits for its word."""
    children: list[ChildProcess] = []

    def start(*arguments: str) -> ChildProcess:
        children.append(
            ChildProcess(
                arguments[0],
                (*arguments, installed),
                None,
                module="transport_bench",
                fork_server=fork_server,
            )
        )
        wait_ready(children[-1:], PATIENCE_S)
        return children[-1]

    yield start
    for child in children:
        end(child)


@pytest.fixture
def other_process(start: Callable[..., ChildProcess]) -> tuple[str, ChildProcess]:
    """A server with large slots in a process of its own."""
    process = start("server")
    assert process.address is not None
    return process.address, process
