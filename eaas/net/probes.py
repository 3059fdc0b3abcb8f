"""HTTP health probes of the roles without an HTTP endpoint: monitor, balancer, expert server.

An orchestrator's own probes (Kubernetes' `httpGet`) start no process. They cannot present a certificate, so
this port has no TLS; its answers say only whether the process is ready (`/health`) and alive (`/live`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping

from eaas.net.grpc_server import port_error

__all__ = ["ProbeServer"]

_JOIN_S = 3.0
# Limits: age of a connection, size of its request, number of connections. More are closed at once.
_AGE_S = 3.0
_HEAD_BYTES = 8192
_CONNECTIONS = 64
_WORDS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class ProbeServer:
    """Answers HTTP health probes from its own thread, until `close`.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        ready: Returns whether the process serves. Called in this object's thread; must not block.
        live: Returns whether the process works, so that a restart would not help. Must not block either.

    Attributes:
        port: The actual port.

    Raises:
        PortInUseError: Another process uses the port.
        ConfigError: The host is not on this machine, or the port needs more rights.
    """

    def __init__(
        self, host: str, port: int, ready: Callable[[], bool], live: Callable[[], bool]
    ) -> None:
        checks = {b"/health": ready, b"/live": live}
        self._connections: set[_Probe] = set()
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                self._loop.create_server(
                    lambda: _Probe(checks, self._connections), host.strip("[]"), port
                )
            )
        except OSError as error:
            self._loop.close()
            raise port_error(error.errno or 0, host, port) from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        """Stop listening, and close all connections, those that are just being accepted, too."""
        self._server.close()
        accepting = asyncio.all_tasks() - {asyncio.current_task()}
        if accepting:
            await asyncio.wait(accepting)
        for connection in tuple(self._connections):
            connection.abort()
        # Let the closed sockets go.
        await asyncio.sleep(0)

    def close(self) -> None:
        """Stop listening and end the thread. Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)


class _Probe(asyncio.Protocol):
    """One connection of a probe: one request, one answer."""

    def __init__(
        self, checks: Mapping[bytes, Callable[[], bool]], connections: set[_Probe]
    ) -> None:
        self._checks = checks
        self._connections = connections
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(_AGE_S, transport.abort)
        if len(self._connections) > _CONNECTIONS:
            transport.abort()

    def abort(self) -> None:
        """Close the connection without an answer, at the end of the process."""
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._head += data
        if b"\r\n\r\n" in self._head:
            self._answer(*self._head.split(b"\r\n", 1)[0].split(b" ")[:2])
        elif len(self._head) > _HEAD_BYTES:
            self._transport.abort()

    def _answer(self, method: bytes = b"", target: bytes = b"") -> None:
        check = self._checks.get(target.partition(b"?")[0])
        if check is None:
            status = 404
        elif method not in (b"GET", b"HEAD"):
            status = 405
        else:
            status = 200 if check() else 503
        body = "" if method == b"HEAD" else "ok\n" if status == 200 else f"{_WORDS[status]}\n"
        self._transport.write(
            f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Type: text/plain\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        # A second request on this connection gets no answer.
        self._checks = {}
        self._transport.close()
