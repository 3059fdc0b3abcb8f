"""One HTTP/1.1 connection to the attention client's endpoint: its deadlines and its eviction."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from attention_client.serving.errors import ApiError
from attention_client.serving.limits import ServeLimits
from attention_client.serving.network.connections import Connections

__all__ = ["HttpConnection", "plain_answer"]

# Longer than clients keep an idle connection, 5 s (httpx) to 60 s (nginx). If both sides closed at the same
# time, a client could send a request into a closed connection.
_KEEP_ALIVE_S = 75.0
# Above this number of connections the short time applies: each connection holds a descriptor.
_MANY_CONNECTIONS = 256
_SHORT_KEEP_ALIVE_S = 5.0


def plain_answer(error: ApiError) -> bytes:
    """Encode an error as a complete HTTP answer that ends the connection."""
    response = error.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [b"HTTP/1.1 %d " % error.status, *(b"%b: %b" % header for header in headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


_EVICTED = plain_answer(
    ApiError(408, "Another client needed the connection of this incomplete request. Send it again.")
)


class HttpConnection(H11Protocol):  # type: ignore[misc]
    """HTTP/1.1 with a timeout on every wait for the client; uvicorn itself waits without a limit."""

    def __init__(self, limits: ServeLimits, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._connections = connections
        # No byte has arrived since the start or the last answer.
        self._silent = True
        self._idle = False
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timeout of a new connection's first request (called by asyncio)."""
        super().connection_made(transport)
        self._connections.reads(self)
        self._wait(self._limits.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes (from asyncio); the first ones after an answer begin a new request."""
        self._silent = False
        self._next_request_begins()
        super().data_received(data)

    def handle_events(self) -> None:
        """Start a request once its headers are complete; once its body is, protect it from eviction."""
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete:
            return
        # This request may have arrived together with the previous one.
        self._next_request_begins()
        if self.cycle.more_body:
            self._connections.reads(self)
        else:
            self._connections.answers(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a closed connection from the open ones and cancel its timeout (called by asyncio)."""
        self._connections.remove(self)
        self._timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Note that the client reads its answer again, so that the next timeout does not disconnect it."""
        self._unsent = 0
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Mark the connection as idle, which allows its eviction; start the timeout of its next request."""
        many = len(self.connections) > _MANY_CONNECTIONS
        self.timeout_keep_alive = _SHORT_KEEP_ALIVE_S if many else _KEEP_ALIVE_S
        self._idle = self._silent = True
        self._connections.idles(self)
        self._timer.cancel()
        self._wait(max(self.timeout_keep_alive, self._limits.head_timeout_s))
        super().on_response_complete()

    def evict(self) -> None:
        """Close the connection now, to make room. A client with an incomplete request gets status 408."""
        begun = self.cycle is not None and not self.cycle.response_complete
        if not self._silent and not (begun and self.cycle.response_started):
            self.transport.write(_EVICTED)
            if begun:
                # Discard what the application sends from now on.
                self.cycle.disconnected = True
        self._close()

    def _next_request_begins(self) -> None:
        if self._idle:
            self._idle = self._silent = False
            self._connections.reads(self)
            self._timer.cancel()
            self._wait(self._limits.head_timeout_s)

    def _wait(self, timeout_s: float) -> None:
        self._timer = self.loop.call_later(timeout_s, self._on_timeout)

    def _on_timeout(self) -> None:
        # During an answer this checks only for a client that reads nothing: the unsent bytes are the same as
        # at the last timeout. Other timeouts of a request are the guard's.
        if self.cycle is not None and not self.cycle.response_complete:
            unsent = self.transport.get_write_buffer_size()
            if not unsent or unsent != self._unsent:
                self._unsent = unsent
                self._wait(self._limits.send_timeout_s)
                return
        self._close()

    def _close(self) -> None:
        # A closed transport keeps its descriptor until it has sent the last byte.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()
