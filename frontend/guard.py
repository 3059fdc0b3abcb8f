"""The HTTP endpoint's checks of requests before its application: hosts, API keys, body limits.

Cancels the work of clients that disconnect.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eaas.generation.errors import ApiError
from frontend.access import Access
from frontend.dashboard.viewers import is_page_path
from frontend.errors import error_response
from frontend.limits import Quota, ServeLimits
from frontend.metrics import ServeMetrics

__all__ = ["MORE_SEQUENCES", "RequestGuard"]

MORE_SEQUENCES = "eaas.more_sequences"
"""Key in an API request's ASGI scope: the function that counts its further sequences (`Quota`)."""

_SMALL_BODY_BYTES = 64 * 2**10  # of each body, not counted against the memory limit
_CLIENT_GONE = 499  # nginx's code; for the metrics only
_REQUEST_ID = "x-request-id"  # repeated in each answer


class RequestGuard:
    """ASGI middleware: checks each request before the application; cancels work whose client leaves.

    Args:
        app: The application.
        paths: Its paths, each with its methods. Those with POST alone take JSON, and their requests count
            towards the limit of sequences.
        limits: Limits of bodies, and of what all requests may generate at a time.
        metrics: Counts the answers.
        access: Decides which requests may pass.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: Mapping[str, Collection[str]],
        limits: ServeLimits,
        metrics: ServeMetrics,
        access: Access,
    ) -> None:
        refusal = f"{limits.max_requests} requests are already running or waiting. Try again later."
        self._sequences = Quota(limits.max_requests, refusal)
        refusal = "Too many large requests are being read. Try again later."
        self._memory = Quota(limits.max_bodies_bytes, refusal)
        self._access = access
        self._app = app
        # Only these get a label, so that a scanner cannot grow the metrics.
        self._named = {"/", *paths}
        self._bodies = {path for path, methods in paths.items() if set(methods) == {"POST"}}
        self._limits = limits
        self._metrics = metrics
        # The deadlines of incomplete bodies, oldest first, and the bytes read of all of them.
        self._reading: dict[asyncio.Timeout, None] = {}
        self._read_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one HTTP request, let the application answer it if it passes, and count its status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, path = _CLIENT_GONE, scope["path"]
        is_post, is_page = scope["method"] == "POST", is_page_path(path)
        if scope["method"] == "HEAD" and is_page:
            # The page has no HEAD of its own. The server sends no body, since its own scope says HEAD.
            scope = {**scope, "method": "GET"}

        request_id = Headers(scope=scope).get(_REQUEST_ID) or str(uuid.uuid4())

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[_REQUEST_ID] = request_id
            await send(message)

        try:
            refusal = self._access.refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, named_send)
            elif is_post and (is_page or path in self._bodies):
                await self._post(scope, receive, named_send)
            else:
                await self._app(scope, receive, named_send)
        finally:
            label = path if path in self._named else "other"
            self._metrics.http_requests.labels(label, str(status)).inc()

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body of a request of the API or the dashboard, and serve it, or refuse it at a limit."""
        try:
            with ExitStack() as stack:
                take_bytes = stack.enter_context(self._memory.share())
                body = await self._read(scope, receive, take_bytes)
                if body is None:
                    return
                if scope["path"] in self._bodies:
                    scope[MORE_SEQUENCES] = stack.enter_context(self._sequences.share())
                    scope[MORE_SEQUENCES](1)
                await self._serve(scope, [body], receive, send)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)

    async def _serve(self, scope: Scope, unread: list[bytes], receive: Receive, send: Send) -> None:
        """Let the application answer; cancel it if the client leaves. `unread` holds the body."""
        loop = asyncio.get_running_loop()

        async def replay() -> Message:
            if not unread:
                await loop.create_future()  # until it is cancelled
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def watch(connected: asyncio.Timeout) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            connected.reschedule(loop.time())

        try:
            async with asyncio.timeout(None) as connected:
                watcher = asyncio.ensure_future(watch(connected))
                try:
                    await self._app(scope, replay, send)
                finally:
                    watcher.cancel()
        except TimeoutError:
            if not connected.expired():
                raise

    async def _read(
        self, scope: Scope, receive: Receive, take: Callable[[int], None]
    ) -> bytes | None:
        """Read a request's whole body within the limits of size, time and memory; None: its client left.

        Raises ApiError (408, 413, 415, 429).
        """
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise ApiError(
                415, f"The body has Content-Encoding {encoding!r}: send it uncompressed."
            )
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["path"] in self._bodies and media_type != "application/json":
            raise ApiError(415, "The Content-Type must be application/json.")
        length = headers.get("content-length", "")
        if length.isdigit():
            self._check_size(int(length))
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s) as deadline:
                self._reading[deadline] = None
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece = message.get("body", b"")
                    body += piece
                    self._read_bytes += len(piece)
                    self._check_size(len(body))
                    take(min(len(piece), max(0, len(body) - _SMALL_BODY_BYTES)))
                    if not message.get("more_body", False):
                        return bytes(body)
                    self._evict_oldest_body()
        except TimeoutError:
            if deadline not in self._reading:
                raise ApiError(
                    408, "Other requests needed the memory of this incomplete body. Send it again."
                ) from None
            seconds = self._limits.body_timeout_s
            raise ApiError(408, f"The body did not arrive within {seconds:g} s.") from None
        finally:
            self._reading.pop(deadline, None)
            self._read_bytes -= len(body)

    def _check_size(self, length: int) -> None:
        """Raise ApiError (413) if a body of so many bytes is too large."""
        if length > self._limits.max_body_bytes:
            raise ApiError(413, f"The body is larger than {self._limits.max_body_bytes} bytes.")

    def _evict_oldest_body(self) -> None:
        """Refuse the oldest incomplete body (408) if incomplete ones take more than half of the memory."""
        if self._read_bytes > self._limits.max_bodies_bytes // 2 and self._reading:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
