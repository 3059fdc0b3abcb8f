"""The HTTP endpoint's checks of requests before its application: hosts, API keys, body limits.

Cancels the work of clients that disconnect.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import uuid
from collections.abc import Callable
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_client.serving.accepted import AcceptedRequests, BodyMemory
from attention_client.serving.dashboard.mount import is_page_path
from attention_client.serving.errors import ApiError
from attention_client.serving.hosts import LoopbackHosts
from attention_client.serving.limits import ServeLimits
from attention_client.serving.metrics.http import ServeMetrics
from eaas.net.api_keys import ApiKeys

__all__ = ["RequestGuard"]

_GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_NAMED_PATHS = _GENERATION_PATHS | {
    "/",
    "/v1/models",
    "/health",
    "/metrics",
    "/eaas/v1/status",
    "/openapi.json",
}
# Health checks and Prometheus send no key.
_OPEN_PATHS = frozenset({"/health", "/metrics"})
_SMALL_BODY_BYTES = 64 * 2**10  # of each body, not counted against the memory limit
_CLIENT_GONE = 499  # nginx's code; for the metrics only
_REQUEST_ID = "x-request-id"  # repeated in the application's answers

# The same answer for a wrong key and for no key.
_UNKNOWN = ApiError(
    401,
    "No valid API key: show one of this endpoint's as 'Authorization: Bearer KEY'.",
    code="invalid_api_key",
)
_LARGE_HEAD = ApiError(400, "The request line and headers are too large.")


def _ask_password() -> Response:
    return PlainTextResponse(
        "The password is one of this endpoint's API keys; any user name will do.\n",
        status_code=401,
        headers={"WWW-Authenticate": 'Basic realm="Expert-as-a-Service", charset="UTF-8"'},
    )


def _as_bearer(header: bytes) -> bytes:
    """Turn a browser's password (HTTP Basic, RFC 7617) into a bearer token, so that one check serves both.

    A header of another kind is unchanged; a malformed password gives an empty one.
    """
    kind, _, credentials = header.partition(b" ")
    if kind.lower() != b"basic":
        return header
    try:
        _, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except binascii.Error:
        return b""
    return b"Bearer " + password


def _head_bytes(scope: Scope) -> int:
    """Size of a request's path, query and headers; the guard refuses a request above `max_head_bytes`."""
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    # ASGI allows a server to leave these two out.
    return fields + len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))


class _ClientGoneError(Exception):
    """The client closed its connection before the request's body was complete."""


class RequestGuard:
    """ASGI middleware: checks each request before the application; cancels work whose client leaves."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ServeLimits,
        metrics: ServeMetrics,
        accepted: AcceptedRequests,
        keys: ApiKeys | None = None,
        hosts: LoopbackHosts | None = None,
    ) -> None:
        self._accepted = accepted
        self._memory = BodyMemory(limits.max_bodies_bytes, _SMALL_BODY_BYTES)
        self._keys = keys
        self._hosts = hosts
        self._app = app
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

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            # uvicorn checks only heads that arrive in several parts.
            if _head_bytes(scope) > self._limits.max_head_bytes:
                await _LARGE_HEAD.response()(scope, receive, counted_send)
                return
            wrong_host = self._hosts.check(scope) if self._hosts is not None else None
            if wrong_host is not None:
                await wrong_host.response()(scope, receive, counted_send)
            elif not self._is_authorised(scope):
                refusal = _ask_password() if is_page else _UNKNOWN.response()
                await refusal(scope, receive, counted_send)
            elif is_post and (is_page or path in _GENERATION_PATHS):
                await self._post(scope, receive, counted_send)
            else:
                await self._answer(scope, receive, counted_send)
        finally:
            # Only known paths get a label, so that a scanner cannot grow the metrics.
            label = path if path in _NAMED_PATHS else "other"
            self._metrics.http_requests.labels(label, str(status)).inc()

    def _is_authorised(self, scope: Scope) -> bool:
        if self._keys is None or scope["path"] in _OPEN_PATHS:
            return True
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(shown) != 1:
            return False
        # Only the page accepts a password, because a browser sends a stored password automatically, even if
        # another page triggers the request.
        header = _as_bearer(shown[0]) if is_page_path(scope["path"]) else shown[0]
        return self._keys.allow(header)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer a request, and add the request's id to the answer."""
        request_id = Headers(scope=scope).get(_REQUEST_ID) or str(uuid.uuid4())

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, named_send)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body of a generation or of a dashboard's POST, and serve it, or refuse it at a limit."""
        try:
            with ExitStack() as stack:
                grow = stack.enter_context(self._memory.body())
                unread = [await self._read(scope, receive, grow)]
                if scope["path"] in _GENERATION_PATHS:
                    stack.enter_context(self._accepted.accept())
                await self._serve(scope, unread, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except _ClientGoneError:
            return

    async def _serve(self, scope: Scope, unread: list[bytes], receive: Receive, send: Send) -> None:
        """Let the application answer; cancel it if the client leaves. `unread` holds the body."""
        gone = asyncio.Event()

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        served = asyncio.ensure_future(self._answer(scope, replay, send))

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            served.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            await served
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not gone.is_set() or (task is not None and task.cancelling()):
                raise
        finally:
            watcher.cancel()

    async def _read(self, scope: Scope, receive: Receive, grow: Callable[[int], None]) -> bytes:
        """Read a request's whole body within the limits of size, time and memory.

        Raises ApiError (408, 413, 415, 429), _ClientGoneError.
        """
        headers = Headers(scope=scope)
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["path"] in _GENERATION_PATHS and media_type != "application/json":
            raise ApiError(415, "The Content-Type must be application/json.")
        too_large = ApiError(413, f"The body is larger than {self._limits.max_body_bytes} bytes.")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s) as deadline:
                self._reading[deadline] = None
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    piece = message.get("body", b"")
                    body += piece
                    self._read_bytes += len(piece)
                    if len(body) > self._limits.max_body_bytes:
                        raise too_large
                    grow(len(body))
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

    def _evict_oldest_body(self) -> None:
        """Refuse the oldest incomplete body (408) if incomplete ones take more than half of the memory."""
        if self._read_bytes > self._limits.max_bodies_bytes // 2 and self._reading:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
