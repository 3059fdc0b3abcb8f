"""One HTTP/1.1 connection to the attention client's endpoint: its heads, deadlines, pings, its eviction."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from eaas.generation.errors import ApiError
from frontend.errors import error_response
from frontend.limits import ServeLimits
from frontend.network.connections import Connection, Connections, State

__all__ = ["HttpConnection"]

# A connection closed with unread bytes would lose the refusal that was sent last.
_LINGER_S = 1.0
# After its client's end of file, a connection is probed after this time, then after twice this time, ...
_FIRST_PROBE_S = 0.2
_MOST_HEAD_BYTES = 16 * 2**10  # request line and headers
_PING = h11.Data(data=b": ping\n\n")
_CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")


class HttpConnection(H11Protocol, Connection):  # type: ignore[misc]
    """HTTP/1.1 with a timeout on every wait for the client; uvicorn itself waits without a limit.

    The guard limits the time of a request's body, and the kernel the time in which a client reads nothing
    (TCP_USER_TIMEOUT, which the server sets).

    A silent stream of events gets comments, so that no proxy takes it for dead. A client may close its
    sending side after its request. One that has left sends the same end of file, but answers the next bytes
    with a reset, which cancels its request. So such a connection is probed while its answer is computed.
    """

    def __init__(self, limits: ServeLimits, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.conn = _Parser()
        self._limits = limits
        self._connections = connections
        # No byte has arrived since the start or the last answer.
        self._silent = True
        self._half_closed = self._has_probe = self._refused = False
        self._beat_s = limits.ping_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout of a new connection's first request (called by asyncio)."""
        super().connection_made(transport)
        self._connections.enter(self, State.READING)
        self._timer = self.loop.call_later(self._limits.head_timeout_s, self.transport.abort)
        if self.refusal is not None:
            self._refuse(self.refusal)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes (from asyncio); the first ones after an answer begin a new request."""
        if self._refused:
            return
        if self._silent:
            self._silent = False
            self._connections.enter(self, State.READING)
            self._wait(self._limits.head_timeout_s, self.transport.abort)
        super().data_received(data)

    def handle_events(self) -> None:
        """Start a request once its headers are complete; once its body is, protect it from eviction."""
        before = self.cycle
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete or self._refused:
            return
        if self.cycle is not before:
            # It may have arrived together with the previous request.
            self._silent = False
            self._begin_beats()
        self._connections.enter(self, State.READING if self.cycle.more_body else State.BUSY)

    def eof_received(self) -> bool:
        """Keep the connection for the answer of a client that has closed its sending side, or has left."""
        cycle = self.cycle
        if self._refused or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        self._has_probe = self.scope["http_version"] != "1.0"
        if not (self._has_probe or cycle.response_started) and self.scope["method"] == "POST":
            # nginx speaks HTTP/1.0, and does not half-close: its client left.
            return False
        self._half_closed = True
        self._begin_beats()
        self._beat()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a closed connection from the open ones and cancel its timeout (called by asyncio)."""
        self._connections.leave(self)
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Mark the connection as idle, which allows its eviction; uvicorn closes it after a while."""
        self._silent = True
        self._connections.enter(self, State.IDLE)
        self._timer.cancel()
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's form (called by uvicorn in the handler of h11's error)."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        self._refuse(ApiError(error.error_status_hint, f"{msg} {error}"))

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        self._connections.enter(self, State.REFUSED)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error_response(error)
            headers = [*response.raw_headers, (b"connection", b"close")]
            lines = [b"HTTP/1.1 %d " % error.status, *(b"%b: %b" % header for header in headers)]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        if self.cycle is not None:
            # Discard what the application sends from now on.
            self.cycle.disconnected = True
        self.transport.write_eof()
        self._wait(_LINGER_S, self.transport.abort)

    def evict(self) -> None:
        """Close the connection now, to make room. A client with an incomplete request gets status 408."""
        if not self._silent and not self._refused:
            message = (
                "Another client needed the connection of this incomplete request. Send it again."
            )
            self._refuse(ApiError(408, message))
        # `close` would keep the descriptor until the last byte is sent.
        self.transport.abort()

    def _should_upgrade(self) -> bool:
        # Java's clients offer h2c with every request. uvicorn would log two lines for each.
        return False

    def _begin_beats(self) -> None:
        self._beat_s = _FIRST_PROBE_S if self._half_closed else self._limits.ping_s
        self.conn.is_quiet = True
        self._wait(self._beat_s, self._beat)

    def _beat(self) -> None:
        """Send a sign of life if nothing was sent since the last beat, and the client reads."""
        conn = self.conn
        if conn.is_quiet and not self.transport.get_write_buffer_size():
            if conn.our_state is h11.SEND_BODY and conn.is_event_stream:
                self.transport.write(conn.send(_PING))
            elif conn.our_state is h11.SEND_RESPONSE and self._has_probe:
                self.transport.write(conn.send(_CONTINUE))
        conn.is_quiet = True
        self._wait(self._beat_s, self._beat)
        self._beat_s = min(2 * self._beat_s, self._limits.ping_s)

    def _wait(self, timeout_s: float, then: Callable[[], None]) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(timeout_s, then)


class _Parser(h11.Connection):
    """h11's parser, with the rules of HTTP/1.1 that it leaves to its user.

    Refuses large heads and ambiguous lengths; knows whether an answer is a stream of events.

    Attributes:
        is_event_stream: Whether the last answer that began is a stream of server-sent events.
        is_quiet: Set by its user; False after anything was sent.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MOST_HEAD_BYTES)
        self.is_event_stream = False
        self.is_quiet = True

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError for a head that is refused."""
        event = super().next_event()
        if type(event) is not h11.Request:
            return event
        self._check(event)
        return event if event.target.startswith(b"/") else _in_origin_form(event)

    def send(self, event: Any) -> Any:
        """Encode an event of the answer."""
        self.is_quiet = False
        if type(event) is h11.Response:
            kinds = (value for name, value in event.headers if name == b"content-type")
            self.is_event_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        return super().send(event)

    def _check(self, head: h11.Request) -> None:
        # h11 itself checks only heads that arrive in several parts.
        fields = sum(len(name) + len(value) + 4 for name, value in head.headers)
        if len(head.target) + fields > _MOST_HEAD_BYTES:
            raise h11.RemoteProtocolError("The head is too large.", error_status_hint=431)
        if not head.http_version.startswith(b"1."):
            raise h11.RemoteProtocolError("HTTP/1.1 is spoken here.", error_status_hint=505)
        names = {name for name, _ in head.headers}
        # A proxy may have read another length (RFC 9112, 6.1).
        if b"transfer-encoding" in names and (
            b"content-length" in names or head.http_version < b"1.1"
        ):
            raise h11.RemoteProtocolError(
                "Transfer-Encoding beside Content-Length or in HTTP/1.0.", error_status_hint=400
            )


def _in_origin_form(head: h11.Request) -> h11.Request:
    """Return a head whose target is a URL, as proxies get it, with path and Host (RFC 9112, 3.2.2)."""
    try:
        url = urlsplit(head.target.decode("ascii"))
    except ValueError as error:
        raise h11.RemoteProtocolError(str(error)) from error
    if url.scheme.lower() not in ("http", "https"):
        return head
    headers = [(name, value) for name, value in head.headers if name != b"host"]
    return h11.Request(
        method=head.method,
        target=(url.path or "/") + (f"?{url.query}" if url.query else ""),
        headers=[(b"host", url.netloc.encode()), *headers],
        http_version=head.http_version,
    )
