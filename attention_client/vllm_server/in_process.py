"""Requests to the application behind the middleware, in its own process and event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Scope

__all__ = ["call"]


async def call(
    app: ASGIApp,
    like: Scope,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes = b"",
) -> AsyncGenerator[Message, None]:
    """Send a request to an ASGI application, and yield the messages of its answer as they come.

    Closing the generator cancels the request, as a client that leaves does.

    Args:
        app: The application.
        like: The scope of a request from outside, whose application and server are used.
        method: HTTP method.
        path: URL path.
        headers: HTTP headers, with lower-case names.
        body: The request's body.
    """
    scope: dict[str, Any] = {
        **{name: like[name] for name in ("app", "state", "server", "root_path") if name in like},
        "type": "http",
        "asgi": like.get("asgi", {"version": "3.0"}),
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "client": ("127.0.0.1", 0),
        "headers": [(b"host", b"localhost"), (b"content-length", b"%d" % len(body)), *headers],
    }
    unsent, gone = [body], asyncio.Event()
    answer: asyncio.Queue[Message | None] = asyncio.Queue()

    async def receive() -> Message:
        if unsent:
            return {"type": "http.request", "body": unsent.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, answer.put)
        finally:
            answer.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        while (message := await answer.get()) is not None:
            yield message
        await running
    finally:
        gone.set()
        running.cancel()
