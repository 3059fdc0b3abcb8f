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

import uvicorn
from fastapi import FastAPI

from attention_client.serve.acceptor import Acceptor
from attention_client.serve.connections import Connections
from attention_client.serve.http_connection import HttpConnection
from attention_client.serve.limits import ServeLimits
from eaas.errors import ClusterError, PortInUseError
from eaas.log import get_logger
from eaas.open_files import room_for_connections

__all__ = ["HttpServer", "bind"]

_log = get_logger(__name__)
_DATE_S = 1.0  # between two looks at the clock for the header
_START_TIMEOUT_S = 60.0
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


class _Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn, which tells the engine when the grace is over instead of cancelling requests.

    So a client whose request is cut off reads an error, and not half an answer. It accepts no more
    connections than there are descriptors for.

    Args:
        config: uvicorn's settings.
        listener: The listening socket; it is closed at the end.
        limits: Of connections.
    """

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, limits: ServeLimits
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._limits = limits

    grace_s = 0.0
    _connections: Connections
    _acceptor: Acceptor
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, then accepts connections."""
        await super().startup(sockets=[])
        self._connections = Connections(min(self._limits.max_connections, room_for_connections()))

        def connection() -> HttpConnection:
            return HttpConnection(
                self._limits,
                self._connections,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )

        self._acceptor = Acceptor(self._listener, connection, self._connections)

    async def on_tick(self, counter: int) -> bool:
        """Once a second, take the date and log what happened to connections."""
        self._connections.log()
        return bool(await super().on_tick(counter))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts no more connections, and lets requests end."""
        self._acceptor.close()
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
        limits: Of connections and of requests' headers.
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
                http=HttpConnection,
                h11_max_incomplete_event_size=limits.max_head_bytes,
                lifespan="on",
            ),
            self._listener,
            limits,
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
        self._server.run()

    def start(self) -> None:
        """Serves in a background thread; returns once it answers. Raises ClusterError."""
        self._thread = threading.Thread(
            target=self._server.run,
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
