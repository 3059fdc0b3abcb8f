"""HTTP probes: answers from state, limits of connections, a port in use."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from eaas.errors import PortInUseError
from eaas.net import probes
from eaas.net.probes import ProbeServer


class State:
    ready, live = False, True


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[ProbeServer]:
    made = ProbeServer("127.0.0.1", 0, lambda: state.ready, lambda: state.live)
    yield made
    made.close()


def ask(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_the_two_states(server: ProbeServer, state: State) -> None:
    assert ask(server.port, "/health") == (503, b"Service Unavailable\n")
    assert ask(server.port, "/live") == (200, b"ok\n")
    state.ready, state.live = True, False
    assert ask(server.port, "/health?verbose") == (200, b"ok\n")
    assert ask(server.port, "/health", "HEAD") == (200, b"")
    assert ask(server.port, "/live")[0] == 503


def test_nothing_else_is_answered(server: ProbeServer) -> None:
    for path in ("/", "/metrics", "/healthy", "*"):
        assert ask(server.port, path)[0] == 404
    assert ask(server.port, "/live", "POST")[0] == 405
    for broken in (b"\r\n\r\n", b"GET\r\n\r\n", b"\x00\xff /live\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), 5) as line:
            line.sendall(broken)
            assert line.recv(100).startswith((b"HTTP/1.1 404", b"HTTP/1.1 405"))


def test_a_request_in_pieces_and_a_second_one(server: ProbeServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as line:
        for piece in (b"GET /li", b"ve HTTP/1.1\r\nHost: a\r\n", b"\r\nGET /live HTTP/1.1\r\n\r\n"):
            line.sendall(piece)
            time.sleep(0.02)
        answer = b"".join(iter(lambda: line.recv(4096), b""))
    assert answer.count(b"HTTP/1.1 200 OK") == 1


def test_slow_and_many_connections_do_not_hold_probes(
    server: ProbeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_AGE_S", 0.3)
    idle = [
        socket.create_connection(("127.0.0.1", server.port), 5)
        for _ in range(probes._CONNECTIONS - 1)
    ]
    assert ask(server.port, "/live")[0] == 200
    # Each is closed without an answer when it is too old.
    for line in idle:
        with line, contextlib.suppress(ConnectionResetError):
            assert line.recv(10) == b""
    with socket.create_connection(("127.0.0.1", server.port), 5) as line:
        line.sendall(b"x" * 2 * probes._HEAD_BYTES)
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(10) == b""


def test_the_port_is_taken(server: ProbeServer) -> None:
    with pytest.raises(PortInUseError, match=str(server.port)):
        ProbeServer("127.0.0.1", server.port, lambda: True, lambda: True)
    server.close()
    again = ProbeServer("127.0.0.1", server.port, lambda: True, lambda: True)
    assert ask(again.port, "/health")[0] == 200
    again.close()


def test_a_connection_that_is_just_accepted_ends_with_the_server() -> None:
    """Else its client waits for an answer until it gives up."""
    silent = []

    def probe(port: int, over: threading.Event) -> None:
        while not over.is_set():
            try:
                with contextlib.suppress(ConnectionError, http.client.HTTPException):
                    ask(port, "/live")
            except TimeoutError:
                silent.append(port)

    for round_ in range(20):
        server, over = ProbeServer("127.0.0.1", 0, bool, lambda: True), threading.Event()
        clients = [threading.Thread(target=probe, args=(server.port, over)) for _ in range(3)]
        for client in clients:
            client.start()
        time.sleep(0.002 + 0.0002 * round_)
        server.close()
        over.set()
        for client in clients:
            client.join()
    assert not silent
