"""Streams in which nothing happens for a while: comments keep proxies patient."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from eaas.errors import ExpertsUnavailableError
from http_box import CHAT, LIMITS, Box, error_of
from raw_http import answer_of, connected, head, post, read_until
from waiting import eventually

pytestmark = pytest.mark.integration

# Long beside the pauses of a busy machine, which the bounds are not about.
PING_S = 0.2
SOON_S = 20.0
ALL = {"prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def impatient_box() -> Iterator[Box]:
    with Box(limits=dataclasses.replace(LIMITS, ping_s=PING_S)) as box:
        yield box


@pytest.fixture
def box(impatient_box: Box) -> Iterator[Box]:
    yield impatient_box
    impatient_box.error, impatient_box.slow_s = None, 0.0
    impatient_box.wait_idle()


def chunks(data: bytes) -> list[bytes]:
    """The chunks of a chunked body; each was one write."""
    found = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        data = rest[int(size, 16) + 2 :]
    return found


def check_events(body: bytes) -> None:
    """Each block is one comment or one event."""
    *blocks, last = body.split(b"\n\n")
    assert last == b""
    for block in blocks:
        if block not in (b": ping", b"data: [DONE]"):
            json.loads(re.fullmatch(rb"(?:event: [a-z_.]+\n)?data: (.*)", block)[1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_slow_prompt_and_slow_tokens(box: Box, path: str) -> None:
    fields: dict[str, Any] = {"stream": True}
    if path == "/v1/completions":
        fields |= {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
    elif path == "/v1/responses":
        fields |= {"input": "hi", "max_output_tokens": 8}
    else:
        fields |= CHAT | {"max_tokens": 8}
    box.slow_s = 4 * PING_S
    with connected(box) as connection:
        begun = time.monotonic()
        connection.sendall(post(fields, path, "Connection: close"))
        seen = read_until(connection, lambda seen: b"\r\n\r\n" in seen)
        assert time.monotonic() - begun < box.slow_s  # the headers do not wait for the prompt
        silence, last = 0.0, time.monotonic()
        while piece := connection.recv(65_536):
            seen += piece
            silence, last = max(silence, time.monotonic() - last), time.monotonic()
    answer = answer_of(seen)
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    parts = chunks(answer.body)
    check_events(b"".join(parts))
    pings = [index for index, part in enumerate(parts) if part == b": ping\n\n"]
    assert len(pings) >= 4
    # Before the first token and between tokens; never within an event.
    assert any(b"data:" in part for part in parts[pings[0] : pings[-1]])
    assert all(part == b": ping\n\n" or b": ping" not in part for part in parts)
    assert silence < 4 * PING_S


def test_a_stream_that_waits_for_its_turn(box: Box) -> None:
    box.slow_s = 5 * PING_S
    # Each needs the whole cache.
    bodies = [ALL | {"prompt": letter * 180, "max_tokens": 8} for letter in "ab"]
    with connected(box) as first, connected(box) as second:
        first.sendall(post(bodies[0]))
        read_until(first, lambda seen: b": ping" in seen)
        second.sendall(post(bodies[1]))
        seen = read_until(second, lambda seen: seen.count(b": ping") >= 5)
        assert b"data:" not in seen
        box.slow_s = 0.0
        read_until(second, lambda seen: b"[DONE]" in seen)


def test_quick_streams_and_whole_answers_have_no_comments(box: Box) -> None:
    box.slow_s = PING_S / 50
    with box.http.stream("POST", "/v1/completions", json=ALL | {"max_tokens": 20}) as answer:
        assert "ping" not in answer.read().decode()
    box.slow_s = 4 * PING_S
    assert box.complete(max_tokens=2)["choices"][0]["text"] == box.text("Hello", 2)


def test_errors_that_are_known_at_once_have_their_status(box: Box) -> None:
    for wrong in ({"prompt": ""}, {"model": "other"}, {"max_tokens": 10_000}):
        answer = box.http.post("/v1/completions", json=ALL | wrong)
        assert answer.status_code in (400, 404)
        error_of(answer)
    box.slow_s, box.error = 4 * PING_S, ExpertsUnavailableError(0, [1], "gone")
    text = box.http.post("/v1/completions", json=ALL).text
    assert text.startswith(": ping\n\n")
    assert '"code": "experts_unavailable"' in text
    check_events(text.encode())


def test_clients_read_past_the_comments(box: Box) -> None:
    box.slow_s = 3 * PING_S
    for chunk in box.openai.chat.completions.create(**CHAT, stream=True, max_tokens=3):
        assert chunk.choices
    with box.openai.responses.stream(model="tiny", input="hi", max_output_tokens=3) as events:
        assert next(event.type for event in events) == "response.created"


def test_pings_keep_no_client_that_reads_nothing() -> None:
    """Its connection is full, and the answer goes on slowly."""
    limits = dataclasses.replace(LIMITS, ping_s=PING_S, send_timeout_s=1.0)
    with Box(limits=limits) as own, socket.socket() as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = own.server.address.split(":")
        ours.connect((host, int(port)))
        for _ in range(4):
            ours.sendall(head("GET /openapi.json HTTP/1.1"))
        own.slow_s, before = 1.0, own.forwards
        ours.sendall(post(ALL))
        eventually(lambda: own.metric("eaas_num_requests_running"), SOON_S)
        own.wait_idle()
        assert own.forwards - before < 30
