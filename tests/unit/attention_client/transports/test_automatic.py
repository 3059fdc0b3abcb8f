"""Transport `auto`: shm where the client can map the server's arena, else grpc, and nothing left behind."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry

from attention_client.connections import opening
from attention_client.connections.connection import Connection
from attention_client.connections.transports import automatic, opener, shared
from attention_client.telemetry.metrics import ClientMetrics
from eaas.config import AttentionClientConfig
from eaas.errors import ConnectionLostError, SharedMemoryError
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.types import Member, MemberState, Role
from eaas.wire import Arena
from transport_bench import (
    SHAPE,
    Client,
    Server,
    answer,
    eventually,
    right,
    segments_mapped,
    send,
    some,
    threads,
)


@pytest.fixture
def auto() -> Iterator[Client]:
    torch.set_num_threads(1)
    client = Client("auto")
    yield client
    for connection in client.connections:
        connection.close()
    eventually(lambda: not threads("grpc-link"))


def serves(connection: Connection) -> bool:
    requests = [some(1 + seed, seed=seed) for seed in range(3)]
    return all(right(answer(connection, send(connection, one)), one) for one in requests)


def opened(client: Client, server: Server, change: Callable[[pb.ConnectResponse], None]) -> str:
    """Open a connection whose grant was changed; returns its transport once it has served."""
    granted, channel = client.grant(server.address)
    change(granted)
    connection = client.open(granted, channel)
    assert serves(connection)
    return connection.transport


def test_a_server_of_this_machine_is_reached_by_shm(auto: Client, server: Server) -> None:
    assert opened(auto, server, lambda _: None) == "shm"
    # One of an earlier release names no machine.
    assert opened(auto, server, lambda granted: granted.ClearField("machine")) == "shm"


def test_on_another_machine_no_process_is_looked_at(
    auto: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(Arena, "attach", lambda *words: tried.append(words))

    def elsewhere(granted: pb.ConnectResponse) -> None:
        granted.machine = "another"

    assert opened(auto, server, elsewhere) == "grpc"
    assert tried == []


def no_such_process(granted: pb.ConnectResponse) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    granted.arena_pid = process.pid


def another_file(granted: pb.ConnectResponse) -> None:
    """The pid and the descriptor exist here, but belong to something else."""
    granted.arena_fd = 0


@pytest.mark.parametrize("change", [no_such_process, another_file])
def test_a_process_of_another_namespace_is_not_mistaken(
    auto: Client, server: Server, change: Callable[[pb.ConnectResponse], None]
) -> None:
    assert opened(auto, server, change) == "grpc"


def test_another_arena_under_the_same_pid_and_descriptor_is_not_mistaken(
    auto: Client, server: Server
) -> None:
    """As in two containers of one image: pid, descriptor, size, user and host name are equal."""
    sizes = server.arena.slots, server.arena.payload_capacity, server.arena.result_capacity
    other = Arena.create_shared(*sizes, incarnation=server.arena.incarnation ^ 1)

    def mistake(granted: pb.ConnectResponse) -> None:
        granted.arena_fd = other.fd

    mapped = segments_mapped()
    assert opened(auto, server, mistake) == "grpc"
    assert segments_mapped() == mapped
    other.close()


def another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def refuse(path: Any, *words: Any, **more: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(path, *words, **more)

    monkeypatch.setattr(os, "open", refuse)


def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mmap.mmap

    def refuse(fd: int, *words: Any, **more: Any) -> mmap.mmap:
        if fd >= 0:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return original(fd, *words, **more)

    monkeypatch.setattr(mmap, "mmap", refuse)


def no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    too_many = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(shared, "watch_process", Mock(side_effect=too_many))


def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "watch_process", Mock(side_effect=ProcessLookupError))


@pytest.mark.parametrize("obstacle", [another_user, not_allowed, no_memory, no_watch, ended])
def test_whatever_prevents_shm_grpc_serves_and_nothing_is_left(
    auto: Client,
    server: Server,
    obstacle: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    leaves_nothing: Callable[..., None],
) -> None:
    def one_more() -> None:
        connection = auto.connect(server.address)
        assert connection.transport == "grpc"
        assert serves(connection)
        # One grant serves both attempts.
        assert len(server.table.clients()) == 1
        connection.close()

    obstacle(monkeypatch)
    leaves_nothing(one_more, 15)


def test_each_connection_decides_anew(
    auto: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        another_user(patch)
        first = auto.connect(server.address)
    first.close()
    second = auto.connect(server.address)
    assert (first.transport, second.transport) == ("grpc", "shm")
    assert serves(second)


def test_shm_alone_says_what_to_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("shm")
    granted, channel = client.grant(server.address)
    granted.machine = "another"
    with channel, pytest.raises(ConnectionLostError, match=r"another machine.*--transport auto"):
        opener("shm")(granted, channel, lambda _: None)
    another_user(monkeypatch)
    granted, channel = client.grant(server.address)
    with channel, pytest.raises(SharedMemoryError, match=r"user.*as one user.*--transport auto"):
        opener("shm")(granted, channel, lambda _: None)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_link_that_fails_gives_its_slots_back(
    server: Server, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Whatever it fails with."""
    monkeypatch.setattr(shared, "_attach", Mock(side_effect=MemoryError))
    monkeypatch.setattr(automatic, "GrpcLink", Mock(side_effect=MemoryError))
    config = AttentionClientConfig(transport=transport)
    host = Member("s", Role.EXPERT_SERVER, 1, "h", server.address, MemberState.SERVING)
    channels: list[grpc.Channel] = []
    original = opening.open_channel
    monkeypatch.setattr(
        opening, "open_channel", lambda *words: channels.append(original(*words)) or channels[-1]
    )
    with pytest.raises(MemoryError):
        opening.open_connection(
            host,
            1,
            lambda _: None,
            open_link=opener(transport),
            client_id="client",
            shape=SHAPE,
            config=config,
            metrics=ClientMetrics(CollectorRegistry()),
            on_lost=lambda _: None,
            tls=None,
        )
    assert not server.table.clients()
    with pytest.raises(ValueError, match="closed channel"):
        channels[0].unary_unary("/x/Y")(b"")
