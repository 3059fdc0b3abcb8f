"""One HTTP/1.1 connection: its deadlines, and its end where another connection needs the place."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from attention_client.serve.connections import Connections
from attention_client.serve.errors import ApiError
from attention_client.serve.limits import ServeLimits

__all__ = ["HttpConnection", "plain_answer"]

# Longer than clients keep an idle connection: where both give up at once, a request is sent into the end
# of it. Common clients: 5 s (httpx) to 60 s (nginx).
_KEEP_ALIVE_S = 75.0
# But no long wait where more than these are open: each holds a descriptor.
_MANY_CONNECTIONS = 256
_SHORT_KEEP_ALIVE_S = 5.0


def plain_answer(error: ApiError) -> bytes:
    """A whole HTTP answer, after which the connection ends."""
    response = error.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [b"HTTP/1.1 %d " % error.status, *(b"%b: %b" % header for header in headers)]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


_EVICTED = plain_answer(
    ApiError(408, "The request was not complete and its connection was needed. Send it again.")
)


class HttpConnection(H11Protocol):  # type: ignore[misc]
    """HTTP/1.1 with an end to every wait for the client; uvicorn itself waits for ever.

    Args:
        limits: How long a request's headers may take, and how long a client may take nothing of an answer.
        connections: Told of each change.
        given: What uvicorn gives its protocols.
    """

    def __init__(self, limits: ServeLimits, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._connections = connections
        # Nothing came yet, or nothing since the last answer.
        self._silent = True
        self._idle = False
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._connections.reads(self)
        self._wait(self._limits.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        """Takes the next bytes."""
        self._silent = False
        self._next_request_begins()
        super().data_received(data)

    def handle_events(self) -> None:
        """Begins what is complete."""
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete:
            return
        # It may have come together with the one before it.
        self._next_request_begins()
        if self.cycle.more_body:
            self._connections.reads(self)
        else:
            self._connections.answers(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._connections.remove(self)
        self._timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """The client takes its answer again."""
        self._unsent = 0
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        many = len(self.connections) > _MANY_CONNECTIONS
        self.timeout_keep_alive = _SHORT_KEEP_ALIVE_S if many else _KEEP_ALIVE_S
        self._idle = self._silent = True
        self._connections.idles(self)
        self._timer.cancel()
        self._wait(max(self.timeout_keep_alive, self._limits.head_timeout_s))
        super().on_response_complete()

    def evict(self) -> None:
        """Close the connection now; a client in the middle of a request is told so."""
        begun = self.cycle is not None and not self.cycle.response_complete
        if not self._silent and not (begun and self.cycle.response_started):
            self.transport.write(_EVICTED)
            if begun:
                # What the application says of it from now on is for nobody.
                self.cycle.disconnected = True
        self._close()

    def _next_request_begins(self) -> None:
        if self._idle:
            self._idle = self._silent = False
            self._connections.reads(self)
            self._timer.cancel()
            self._wait(self._limits.head_timeout_s)

    def _wait(self, timeout_s: float) -> None:
        self._timer = self.loop.call_later(timeout_s, self._look)

    def _look(self) -> None:
        # Between a request's headers and the end of its answer others see to the time, but for a client that
        # takes nothing: the same bytes wait to be sent as at the last look.
        if self.cycle is not None and not self.cycle.response_complete:
            unsent = self.transport.get_write_buffer_size()
            if not unsent or unsent != self._unsent:
                self._unsent = unsent
                self._wait(self._limits.send_timeout_s)
                return
        self._close()

    def _close(self) -> None:
        # Until the last byte is sent, a closed transport keeps its descriptor.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()
