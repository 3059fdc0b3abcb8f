"""The limits of bodies, for generations and for the dashboard's page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from frontend.access import Access
from frontend.guard import RequestGuard
from frontend.limits import ServeLimits
from frontend.metrics import ServeMetrics

PATHS = ("/v1/completions", "/tokenize", "/detokenize", "/eaas/v1/actions")


def part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


class Guarded:
    """A guard before an application that reads the body and answers 200."""

    def __init__(self, **limits: Any) -> None:
        metrics = ServeMetrics(CollectorRegistry())
        self.guard = RequestGuard(
            self._app,
            {path: {"POST"} for path in PATHS[:3]},
            ServeLimits(**{"max_body_bytes": 10, "max_requests": 8} | limits),
            metrics,
            Access(),
        )
        self.bodies: list[bytes] = []

    async def _app(self, _scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert not message["more_body"]
        self.bodies.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def post(self, path: str, *messages: Message, length: int = 0) -> int | None:
        """Post these messages, then send nothing more; return the status."""
        left, statuses = list(messages), []

        async def receive() -> Message:
            if not left:
                await asyncio.Event().wait()
            return left.pop(0)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
        headers += [(b"content-length", b"%d" % length)] if length else []
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await self.guard(scope, receive, send)
        return statuses[0] if statuses else None


@pytest.fixture(params=PATHS)
def post(request: pytest.FixtureRequest) -> Callable[..., tuple[int | None, list[bytes]]]:
    """Posts messages; returns the status and the bodies that the application received."""

    def post(*messages: Message, length: int = 0) -> tuple[int | None, list[bytes]]:
        guarded = Guarded(body_timeout_s=0.1)
        posted = guarded.post(request.param, *messages, length=length)
        return asyncio.run(asyncio.wait_for(posted, 20)), guarded.bodies

    return post


def test_the_application_receives_the_whole_body(post: Callable[..., Any]) -> None:
    assert post(part(b"abc", more=True), part(b"def", more=False)) == (200, [b"abcdef"])


def test_an_incomplete_body_times_out(post: Callable[..., Any]) -> None:
    assert post(part(b"abc", more=True)) == (408, [])


def test_a_large_body_is_refused(post: Callable[..., Any]) -> None:
    assert post(part(b"a" * 6, more=True), part(b"a" * 6, more=False)) == (413, [])
    assert post(length=11) == (413, [])


def test_a_client_that_leaves_early_gets_no_answer(post: Callable[..., Any]) -> None:
    assert post(part(b"abc", more=True), {"type": "http.disconnect"}) == (None, [])


def test_incomplete_bodies_have_limited_memory_and_the_oldest_are_evicted() -> None:
    async def attack() -> None:
        guarded = Guarded(max_bodies_bytes=70, body_timeout_s=20.0)
        half_sent = []
        for _ in range(6):
            half_sent.append(asyncio.create_task(guarded.post(PATHS[0], part(b"a" * 9, more=True))))
            await asyncio.sleep(0.01)
        honest = await guarded.post(PATHS[0], part(b"a" * 9, more=True), part(b"b", more=False))
        assert honest == 200
        await asyncio.sleep(0.01)  # the last one to be refused has its own task
        assert [task.result() for task in half_sent if task.done()] == [408] * 4
        assert all(task.done() for task in half_sent[:4])
        for task in half_sent:
            task.cancel()
        await asyncio.gather(*half_sent, return_exceptions=True)
        # Their memory is free again.
        assert await asyncio.wait_for(guarded.post(PATHS[0], part(b"a" * 9, more=False)), 5) == 200

    asyncio.run(asyncio.wait_for(attack(), 20))


def test_the_first_bytes_of_each_body_need_no_memory() -> None:
    async def post() -> None:
        guarded = Guarded(max_body_bytes=2**20, max_bodies_bytes=100)
        for more, status in ((100, 200), (101, 429), (0, 200)):
            body = b"a" * (2**16 + more)
            assert await guarded.post(PATHS[0], part(body, more=False)) == status

    asyncio.run(asyncio.wait_for(post(), 20))
