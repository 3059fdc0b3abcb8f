"""A client of each transport in turn, and servers for it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import torch

from eaas.one_sided import why_not
from transport_bench import (
    LARGE,
    Client,
    Server,
    end,
    eventually,
    said,
    start,
    threads,
)

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))


@pytest.fixture(params=["shm", "grpc", NIXL])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    torch.set_num_threads(1)
    client = Client(request.param)
    yield client
    for connection in client.connections:
        connection.close()
    eventually(lambda: not threads("cable", "joined"))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


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
def other_process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server with large slots in a process of its own."""
    process = start("server")
    yield said(process), process
    end(process)
