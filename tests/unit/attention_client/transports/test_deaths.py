"""Conformance of all transports: servers and clients that die, stop or close."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable

import pytest

from attention_client.connections.connection import Connection
from eaas.errors import ConnectionLostError
from eaas_cli.local.process import ChildProcess
from expert_server.transports import nixl_endpoint
from transport_bench import (
    LARGE,
    PATIENCE_S,
    Client,
    Server,
    answer,
    end,
    eventually,
    pause,
    right,
    send,
    some,
    tried,
)


def test_the_server_takes_its_slots_back(client: Client, idle_server: Server) -> None:
    connection = client.connect(idle_server.address)
    ticket = send(connection, some(1))
    eventually(idle_server.written)
    waiter = threading.Thread(target=idle_server.table.revoke_all)
    waiter.start()
    with pytest.raises(ConnectionLostError):
        answer(connection, ticket)
    waiter.join()
    with pytest.raises(ConnectionLostError):
        send(connection, some(1))
    assert client.lost == [connection]


def test_closing_under_a_waiter(client: Client, idle_server: Server) -> None:
    connection = client.connect(idle_server.address)
    ticket = send(connection, some(1))
    eventually(idle_server.written)
    closer = threading.Thread(target=connection.close)
    closer.start()
    with pytest.raises(ConnectionLostError):
        answer(connection, ticket)
    closer.join()
    with pytest.raises(ValueError, match="closed"):
        _ = connection._link.arena.buffer
    connection.wake()
    assert not connection.owes_answer()
    eventually(lambda: not idle_server.table.clients())


def test_closing_leaves_no_thread_or_slot(
    client: Client, server: Server, leaves_nothing: Callable[..., None]
) -> None:
    def one_more() -> None:
        connection = client.connect(server.address)
        abandoned = send(connection, some(1))
        request = some(2)
        assert right(answer(connection, send(connection, request)), request)
        connection.abandon(abandoned, overdue=True)
        connection.close()

    leaves_nothing(one_more, 50)


def test_a_server_that_dies_before_the_link(
    client: Client, other_process: tuple[str, ChildProcess]
) -> None:
    address, process = other_process
    granted, channel = client.grant(address)
    end(process)
    # Some transports see it at once.
    with contextlib.suppress(ConnectionLostError):
        connection = client.open(granted, channel)
        eventually(lambda: connection.lost_reason)
        send(connection, some(1))
        raise AssertionError("written to a dead server")


def test_a_server_that_dies_before_the_first_write(
    client: Client, other_process: tuple[str, ChildProcess]
) -> None:
    address, process = other_process
    connection = client.connect(address)
    end(process)
    with pytest.raises(ConnectionLostError):
        answer(connection, send(connection, some(1)))
    eventually(lambda: client.lost == [connection])


def test_a_server_that_dies_with_a_request_in_flight(
    client: Client, other_process: tuple[str, ChildProcess]
) -> None:
    address, process = other_process
    connection = client.connect(address)
    request = some(2)
    assert right(answer(connection, send(connection, request)), request)
    pause(process)  # So that it cannot answer before it dies.
    ticket = send(connection, some(2))
    started = time.monotonic()
    process.signal(signal.SIGKILL)
    with pytest.raises(ConnectionLostError):
        answer(connection, ticket)
    assert time.monotonic() - started < PATIENCE_S / 4  # At once, but for a busy machine.
    assert client.lost == [connection]


def test_a_server_that_dies_while_it_answers(
    client: Client, other_process: tuple[str, ChildProcess]
) -> None:
    address, process = other_process
    connection = client.connect(address)
    requests = [some(LARGE, seed=seed) for seed in range(4)]
    tickets = [send(connection, request) for request in requests]
    assert right(answer(connection, tickets[0]), requests[0])
    process.signal(signal.SIGKILL)
    for ticket, request in zip(tickets[1:], requests[1:], strict=True):
        with contextlib.suppress(ConnectionLostError):
            assert right(answer(connection, ticket), request)
    eventually(lambda: client.lost == [connection])


@pytest.mark.parametrize("step", ["connected", "asking", "answered"])
def test_a_client_that_dies(
    client: Client,
    start: Callable[..., ChildProcess],
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_endpoint, "GRACE_S", 0.2)
    large_server = Server(slots=4, tokens=LARGE, run=step != "asking")
    end(start("client", client.transport, large_server.address, step))
    if client.transport == "shm":
        large_server.table.revoke_incarnations(
            "other", 1
        )  # No stream ends: this is the lease's part.
    # Its slots come back, and they work.
    eventually(lambda: not large_server.table.clients())
    box: list[Connection] = []
    eventually(lambda: box.append(tried(lambda: client.connect(large_server.address))) or box[-1])
    tickets = [send(box[-1], some(LARGE, seed=seed)) for seed in range(4)]
    if step == "asking":
        eventually(lambda: len(large_server.written()) == 4)
        large_server.loop.serve(large_server.written())
    for seed, ticket in enumerate(tickets):
        assert right(answer(box[-1], ticket), some(LARGE, seed=seed))
    box[-1].close()
    large_server.close()


def test_a_stopped_server_owes_its_answer(
    client: Client, other_process: tuple[str, ChildProcess]
) -> None:
    address, process = other_process
    connection = client.connect(address)
    pause(process)
    ticket = send(connection, some(2))
    seen = connection.seq()
    connection.wait(ticket, seen, 0.1)
    assert connection.poll(ticket) is None
    connection.abandon(ticket, overdue=True)
    assert connection.owes_answer()
    process.signal(signal.SIGCONT)
    eventually(lambda: not connection.owes_answer())
    assert client.late_answers() == 1
    request = some(3, seed=5)
    assert right(answer(connection, send(connection, request)), request)
    assert connection.lost_reason is None
