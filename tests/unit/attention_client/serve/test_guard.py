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


def test_unfinished_bodies_have_a_bound_in_memory_and_the_oldest_go_first() -> None:
    """Clients that send most of a body and stop; then one that is honest."""
    limits = ServeLimits(max_body_bytes=10, max_bodies_bytes=70, body_timeout_s=20.0)
    answers: list[tuple[str, int]] = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        assert not (await receive())["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = RequestGuard(app, limits, ServeMetrics(CollectorRegistry()), AcceptedRequests(8))

    async def post(name: str, *messages: Message) -> None:
        left = list(messages)

        async def receive() -> Message:
            if not left:
                await asyncio.Event().wait()
            return left.pop(0)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answers.append((name, message["status"]))

        headers = [(b"content-type", b"application/json")]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": PATHS[0],
            "headers": headers,
        }
        await guard(scope, receive, send)

    async def attack() -> None:
        tasks = []
        for i in range(6):
            tasks.append(asyncio.create_task(post(f"half {i}", part(b"a" * 9, more=True))))
            await asyncio.sleep(0.01)
        await post("honest", part(b"a" * 9, more=True), part(b"b", more=False))
        assert sorted(answers) == [*((f"half {i}", 408) for i in range(4)), ("honest", 200)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What they held is free again.
        await asyncio.wait_for(post("later", part(b"a" * 9, more=False)), 5)
        assert answers[-1] == ("later", 200)

    asyncio.run(asyncio.wait_for(attack(), 20))
