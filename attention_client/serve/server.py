"""The HTTP server process: uvicorn on a socket that is bound before anything else happens."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import socket
import threading
from collections.abc import Callable
from typing import ClassVar

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from attention_client.serve.limits import ServeLimits
from eaas.errors import ClusterError, PortInUseError
from eaas.log import get_logger

__all__ = ["HttpServer", "bind"]

_log = get_logger(__name__)
_DATE_S = 1.0  # between two looks at the clock for the header
_START_TIMEOUT_S = 60.0
# Longer than clients keep an idle connection: where both give up at once, a request is sent into the end
# of it. Common clients: 5 s (httpx) to 60 s (nginx).
_KEEP_ALIVE_S = 75.0
# But no long wait where more than these are open: each holds a descriptor.
_MANY_CONNECTIONS = 256
_SHORT_KEEP_ALIVE_S = 5.0
_CLOSE_PAGES_S = 5.0
_AFTER_GRACE_S = 10.0  # failed requests and the engine end well before that


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one.

    Bind before a model is loaded, so that a taken port is known at once. Raises PortInUseError, and
    ClusterError for a host that is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ClusterError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        # Else a restart would wait for the old connections' TIME_WAIT. A listener still excludes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"{host}:{port} is in use: choose another port or stop what listens there"
            ) from error
        raise ClusterError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


class _Protocol(H11Protocol):  # type: ignore[misc]
    """HTTP/1.1 that waits for a request's headers for a limited time: uvicorn itself waits for ever.

    A connection may idle longer than that between two requests.
    """

    head_timeout_s: ClassVar[float]

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._idle = False
        self._wait(self.head_timeout_s)

    def data_received(self, data: bytes) -> None:
        if self._idle:
            # The next request begins.
            self._idle = False
            self._timer.cancel()
            self._wait(self.head_timeout_s)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        many = len(self.connections) > _MANY_CONNECTIONS
        self.timeout_keep_alive = _SHORT_KEEP_ALIVE_S if many else _KEEP_ALIVE_S
        self._idle = True
        self._timer.cancel()
        self._wait(max(self.timeout_keep_alive, self.head_timeout_s))
        super().on_response_complete()

    def _wait(self, timeout_s: float) -> None:
        self._timer = self.loop.call_later(timeout_s, self._look)

    def _look(self) -> None:
        # Between a request's headers and the end of its answer others see to the time.
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait(self.head_timeout_s)
        else:
            self.transport.close()


class _Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn, which tells the engine when the grace is over instead of cancelling requests.

    So a client whose request is cut off reads an error, and not half an answer.
    """

    grace_s = 0.0
    _wake: Callable[[], object] | None = None
    _should_exit = False

    @property
    def should_exit(self) -> bool:
        """Whether it is to end. Setting it wakes the loop, from any thread and from a signal's handler."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, wanted: bool) -> None:
        self._should_exit = wanted
        if self._wake is not None:
            self._wake()

    async def main_loop(self) -> None:
        """Sleeps until it is to end, but for the date: uvicorn's ten looks a second cost too much."""
        loop, stirred = asyncio.get_running_loop(), asyncio.Event()
        self._wake = functools.partial(loop.call_soon_threadsafe, stirred.set)
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await stirred.wait()
        self._wake = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        close_pages = self.config.app.state.close_pages
        if close_pages is not None:
            try:
                async with asyncio.timeout(_CLOSE_PAGES_S):
                    await close_pages()
            except Exception:  # noqa: BLE001 (logged; requests end as they should all the same)
                _log.exception("the dashboard did not close")
        end_requests = self.config.app.state.end_requests
        self.config.timeout_graceful_shutdown = math.ceil(self.grace_s + _AFTER_GRACE_S)
        timer = loop.call_later(self.grace_s, loop.run_in_executor, None, end_requests)
        await super().shutdown(sockets)
        timer.cancel()


class HttpServer:
    """Serves an application. Raises PortInUseError when made.

    Args:
        app: The application, from `build_app`.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        listener: A socket from `bind`, in place of host and port.
        limits: Of what headers may be, and how long they may take.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str,
        port: int,
        listener: socket.socket | None = None,
        limits: ServeLimits | None = None,
    ) -> None:
        limits = limits or ServeLimits()
        protocol = type("Protocol", (_Protocol,), {"head_timeout_s": limits.head_timeout_s})
        self._listener = bind(host, port) if listener is None else listener
        name, number = self._listener.getsockname()[:2]
        self._address = f"[{name}]:{number}" if ":" in name else f"{name}:{number}"
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                # Whatever else is installed: what is tested is what serves.
                loop="asyncio",
                http=protocol,
                h11_max_incomplete_event_size=limits.max_head_bytes,
                lifespan="on",
            )
        )
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """host:port, with the real port."""
        return self._address

    def run(self, grace_s: float) -> None:
        """Serves in the calling thread until SIGTERM, SIGINT or `stop`.

        Args:
            grace_s: After a signal, how long running requests may go on.
        """
        self._server.grace_s = grace_s
        self._server.run(sockets=[self._listener])

    def start(self) -> None:
        """Serves in a background thread; returns once it answers. Raises ClusterError."""
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._listener]},
            name="http",
            daemon=True,
        )
        self._thread.start()
        waited = threading.Event()
        for _ in range(int(_START_TIMEOUT_S / 0.02)):
            if self._server.started:
                return
            if not self._thread.is_alive():
                break
            waited.wait(0.02)
        raise ClusterError(f"the HTTP server on {self._address} did not start")

    def stop(self, grace_s: float) -> None:
        """Takes no more connections, lets running requests go on for grace_s, then fails them.

        Raises ClusterError if the server's thread does not end.
        """
        self._server.grace_s = grace_s
        self._server.should_exit = True
        if self._thread is None:
            return
        self._thread.join(grace_s + 2 * _AFTER_GRACE_S)
        if self._thread.is_alive():
            raise ClusterError(f"the HTTP server on {self._address} did not stop")
        self._thread = None
