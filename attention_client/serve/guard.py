"""What stands before the application: hosts, keys, limits of bodies, and an end to work nobody waits for."""

from __future__ import annotations

import asyncio
import base64
import binascii

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_client.dashboard.mount import is_page_path
from attention_client.serve.accepted import AcceptedRequests, BodyMemory, BodyShare
from attention_client.serve.errors import ApiError
from attention_client.serve.hosts import LoopbackHosts
from attention_client.serve.limits import ServeLimits
from attention_client.serve.metrics import ServeMetrics
from eaas.api_keys import ApiKeys

__all__ = ["GENERATION_PATHS", "RequestGuard"]

GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_NAMED_PATHS = GENERATION_PATHS | {
    "/",
    "/v1/models",
    "/health",
    "/metrics",
    "/eaas/v1/status",
    "/openapi.json",
}
# Health checks and Prometheus come without a key.
_OPEN_PATHS = frozenset({"/health", "/metrics"})
_SMALL_BODY_BYTES = 64 * 2**10  # so much of a body always finds memory
_CLIENT_GONE = 499  # nginx's number; nobody receives it


# The same whether a key is wrong or none is shown.
_UNKNOWN = ApiError(
    401,
    "No valid API key: show one of this endpoint's as 'Authorization: Bearer KEY'.",
    code="invalid_api_key",
)


def _ask() -> Response:
    return PlainTextResponse(
        "The password is one of this endpoint's API keys; any user name will do.\n",
        status_code=401,
        headers={"WWW-Authenticate": 'Basic realm="Expert-as-a-Service", charset="UTF-8"'},
    )


def _as_bearer(header: bytes) -> bytes:
    """The password of HTTP Basic (RFC 7617) as a bearer token; what is none stays as it is."""
    kind, _, credentials = header.partition(b" ")
    if kind.lower() != b"basic":
        return header
    try:
        _, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except binascii.Error:
        return b""
    return b"Bearer " + password


def _headers(scope: Scope) -> dict[bytes, str]:
    return {name: value.decode("latin-1") for name, value in scope["headers"]}


def _whole(body: bytes) -> Message:
    """The one message of a body that has arrived."""
    return {"type": "http.request", "body": body, "more_body": False}


class _ClientGoneError(Exception):
    """The connection closed before the body was complete."""


class RequestGuard:
    """ASGI middleware: reads bodies under limits, and cancels a generation when its client leaves.

    Args:
        app: What it stands before.
        limits: Body size and time.
        metrics: Counts each request by endpoint and status.
        accepted: Counts the generations that are accepted.
        keys: What requests have to show; None: nothing.
        hosts: The hosts that requests may name; None: any.
    """

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
        # The deadlines of bodies that are being read, the oldest first, and the bytes of all of them.
        self._reading: dict[asyncio.Timeout, None] = {}
        self._read_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_GONE

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            stranger = self._hosts.check(scope) if self._hosts is not None else None
            if stranger is not None:
                await stranger.response()(scope, receive, counted_send)
            elif not self._may(scope):
                refused = _ask() if is_page_path(scope["path"]) else _UNKNOWN.response()
                await refused(scope, receive, counted_send)
            elif scope["method"] == "POST" and scope["path"] in GENERATION_PATHS:
                await self._generation(scope, receive, counted_send)
            elif scope["method"] == "POST" and is_page_path(scope["path"]):
                await self._page(scope, receive, counted_send)
            else:
                await self._app(scope, receive, counted_send)
        finally:
            # Only known paths: a scanner must not grow the metrics.
            path = scope["path"] if scope["path"] in _NAMED_PATHS else "other"
            self._metrics.http_requests.labels(path, str(status)).inc()

    def _may(self, scope: Scope) -> bool:
        if self._keys is None or scope["path"] in _OPEN_PATHS:
            return True
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(shown) != 1:
            return False
        # Browsers ask people for a password. Only the page takes one: what else is in the browser could
        # have it shown elsewhere, too, unasked.
        header = _as_bearer(shown[0]) if is_page_path(scope["path"]) else shown[0]
        return self._keys.allow(header)

    async def _generation(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._memory.body() as share:
                unread = [_whole(await self._read_json(scope, receive, share))]
                with self._accepted.accept():
                    await self._serve(scope, unread, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except _ClientGoneError:
            return

    async def _serve(
        self, scope: Scope, unread: list[Message], receive: Receive, send: Send
    ) -> None:
        """Lets the application answer, until the client leaves."""
        gone = asyncio.Event()

        async def replay() -> Message:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        served = asyncio.ensure_future(self._app(scope, replay, send))

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

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A post of the dashboard's page, which by itself would wait for its body for ever."""
        try:
            with self._memory.body() as share:
                unread = [_whole(await self._read(_headers(scope), receive, share))]
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        except _ClientGoneError:
            return

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, replay, send)

    async def _read_json(self, scope: Scope, receive: Receive, share: BodyShare) -> bytes:
        """A generation's body. Raises ApiError (408, 413, 415, 429), _ClientGoneError."""
        headers = _headers(scope)
        media_type = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ApiError(415, "The Content-Type must be application/json.")
        return await self._read(headers, receive, share)

    async def _read(self, headers: dict[bytes, str], receive: Receive, share: BodyShare) -> bytes:
        """The body. Raises ApiError (408, 413, 429), _ClientGoneError."""
        too_large = ApiError(413, f"The body is larger than {self._limits.max_body_bytes} bytes.")
        length = headers.get(b"content-length", "")
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
                    share.grow(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
                    self._make_room()
        except TimeoutError:
            if deadline not in self._reading:
                raise ApiError(
                    408, "The body was not complete and its memory was needed. Send it again."
                ) from None
            seconds = self._limits.body_timeout_s
            raise ApiError(408, f"The body did not arrive within {seconds:g} s.") from None
        finally:
            self._reading.pop(deadline, None)
            self._read_bytes -= len(body)

    def _make_room(self) -> None:
        """Give up the oldest body where those that are not complete leave too little to the others."""
        if self._read_bytes > self._limits.max_bodies_bytes // 2 and self._reading:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
