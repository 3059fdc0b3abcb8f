"""Bodies are read under limits: those of generations, and those of the dashboard's page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from attention_client.serve.accepted import AcceptedRequests
from attention_client.serve.guard import RequestGuard
from attention_client.serve.limits import ServeLimits
from attention_client.serve.metrics import ServeMetrics

LIMITS = ServeLimits(max_body_bytes=10, body_timeout_s=0.1)
PATHS = ("/v1/completions", "/_nicegui_ws/socket.io/")


def part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.fixture
def post() -> Callable[..., tuple[int | None, bytes]]:
    """Posts these messages, after which nothing comes; the status, and the body as the application saw it."""

    def post(path: str, messages: Sequence[Message], length: int = 0) -> tuple[int | None, bytes]:
        left, seen, statuses = list(messages), bytearray(), []

        async def app(_scope: Scope, receive: Receive, send: Send) -> None:
            while (message := await receive())["type"] == "http.request":
                seen.extend(message["body"])
                if not message["more_body"]:
                    break
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def receive() -> Message:
            if not left:
                await asyncio.Event().wait()
            return left.pop(0)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
        headers += [(b"content-length", b"%d" % length)] if length else []
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": headers}
        guard = RequestGuard(app, LIMITS, ServeMetrics(CollectorRegistry()), AcceptedRequests(8))
        asyncio.run(asyncio.wait_for(guard(scope, receive, send), 20))
        return (statuses[0] if statuses else None), bytes(seen)

    return post


@pytest.mark.parametrize("path", PATHS)
def test_a_body_is_seen_whole(path: str, post: Callable[..., Any]) -> None:
    assert post(path, [part(b"abc", more=True), part(b"def", more=False)]) == (200, b"abcdef")


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_does_not_end_is_not_waited_for(path: str, post: Callable[..., Any]) -> None:
    assert post(path, [part(b"abc", more=True)]) == (408, b"")


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_too_large_is_refused(path: str, post: Callable[..., Any]) -> None:
    assert post(path, [part(b"a" * 6, more=True), part(b"a" * 6, more=False)]) == (413, b"")
    assert post(path, [], length=11) == (413, b"")


@pytest.mark.parametrize("path", PATHS)
def test_who_leaves_before_the_end_is_answered_by_nobody(
    path: str, post: Callable[..., Any]
) -> None:
    assert post(path, [part(b"abc", more=True), {"type": "http.disconnect"}]) == (None, b"")
