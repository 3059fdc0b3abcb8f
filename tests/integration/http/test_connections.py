"""Useless connections, more than the process has file descriptors."""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from few_files import few_files, no_files
from half_sender import half_senders
from http_box import LIMITS, Box, error_of
from raw_http import connected, read_all
from waiting import eventually

pytestmark = pytest.mark.integration

FILES = 150
COUNT = 400
SOON_S = 20.0


@pytest.fixture(scope="module")
def small_box() -> Iterator[Box]:
    """A server with file descriptors for about a hundred connections."""
    with few_files(FILES), Box() as box:
        yield box


@pytest.mark.parametrize("kind", ["body", "head", "silent", "idle"])
def test_honest_clients_are_served_beside_useless_connections(
    small_box: Box, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        half_senders(small_box.server.address, kind, COUNT),
    ):
        for _ in range(10):
            # A new connection each time.
            answer = httpx.post(
                f"{small_box.url}/v1/completions",
                json={"prompt": "Hello", "max_tokens": 8, "ignore_eos": True},
                timeout=SOON_S,
            )
            assert answer.json()["choices"][0]["text"] == small_box.text("Hello", 8)
    # At most one log line a minute; the four attacks take less. Clusters of other tests may write, too.
    records = [record for record in caplog.records if "serving.network" in record.name]
    assert len(records) <= 1
    assert all("connections at once" in record.getMessage() for record in records)
    assert all(record.exc_info is None for record in records)


def test_an_evicted_request_gets_an_answer(small_box: Box) -> None:
    with connected(small_box) as ours:
        ours.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt": '
        )
        time.sleep(0.1)
        with half_senders(small_box.server.address, "body", COUNT):
            answer = read_all(ours)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head
    assert b"Send it again" in body


def test_a_long_answer_goes_on_beside_useless_connections(small_box: Box) -> None:
    body = {"prompt": "Hello", "max_tokens": 24, "ignore_eos": True, "stream": True}
    small_box.slow_s = 0.05
    try:
        with httpx.stream(
            "POST", f"{small_box.url}/v1/completions", json=body, timeout=SOON_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            with half_senders(small_box.server.address, "body", COUNT):
                assert list(lines)[-2] == "data: [DONE]"
    finally:
        small_box.slow_s = 0.0


def test_connections_beyond_the_most_are_refused_where_all_are_busy() -> None:
    body = {"prompt": "Hello", "max_tokens": 24, "ignore_eos": True, "stream": True}
    with Box(limits=dataclasses.replace(LIMITS, max_connections=4)) as box:
        box.slow_s = 0.2
        with ExitStack() as streams:
            for _ in range(4):
                request = httpx.stream(
                    "POST", f"{box.url}/v1/completions", json=body, timeout=SOON_S
                )
                streams.enter_context(request)
            refused = httpx.get(f"{box.url}/health", timeout=SOON_S)
            assert refused.status_code == 429
            assert error_of(refused)["code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
        health = f"{box.url}/health"
        eventually(lambda: httpx.get(health, timeout=SOON_S).status_code == 200, SOON_S)


def test_a_shortage_of_descriptors_logs_no_traceback(
    small_box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    assert small_box.http.get("/health").status_code == 200
    with caplog.at_level(logging.WARNING):
        with no_files() as held:
            # One descriptor for this client's socket.
            os.close(held.pop())
            ours = connected(small_box)
            begun = time.process_time()
            time.sleep(1.0)
            assert time.process_time() - begun < 0.5
        with ours:
            ours.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert ours.recv(65_536).startswith(b"HTTP/1.1 200 ")
    assert all(record.exc_info is None for record in caplog.records)


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    with Box(limits=dataclasses.replace(LIMITS, send_timeout_s=0.5, head_timeout_s=0.5)) as box:
        host, port = box.server.address.split(":")
        with socket.socket() as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ours.connect((host, int(port)))
            ours.setblocking(False)
            poll = select.poll()
            poll.register(ours, select.POLLOUT)
            request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
            deadline = time.monotonic() + SOON_S
            hung_up = False
            while not hung_up:
                assert time.monotonic() < deadline, "it is still open"
                for _, event in poll.poll(100):
                    hung_up = bool(event & (select.POLLERR | select.POLLHUP))
                    if event & select.POLLOUT and not hung_up:
                        try:
                            ours.send(request * 100)
                        except (BlockingIOError, ConnectionError):
                            time.sleep(0.05)
