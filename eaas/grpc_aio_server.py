"""A gRPC server for very many streams: handlers are coroutines of one thread, not a thread each.

For services whose streams mostly wait; what a handler does in between holds up all the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eaas.grpc_loop import run_on_loop
from eaas.grpc_secret import AioSecretGuard
from eaas.grpc_server import add_port, server_options

__all__ = ["RunningAioServer", "serve_aio"]

# Beyond the grace that a stop gives: the loop has much to do when thousands of streams end.
_PATIENCE_S = 10.0


class RunningAioServer:
    """A server that answers. Its health is NOT_SERVING until the owner says otherwise.

    Its methods are for any thread but that of `loop`.

    Attributes:
        address: host:port to tell others. Where the server listens on a wildcard the machine's host
            name stands in for it.
        loop: Runs the handlers.
    """

    def __init__(
        self, server: Any, health_servicer: Any, service: str, address: str, loop: Any
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._services = ("", service)
        self.address = address
        self.loop: asyncio.AbstractEventLoop = loop

    def set_serving(self, serving: bool) -> None:
        """What the health service answers, for the whole server ("") and for the service."""
        run_on_loop(self._set_serving(serving), _PATIENCE_S)

    async def _set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in self._services:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives running ones `grace_s` seconds, then cancels them. Blocks."""
        run_on_loop(self._stop(grace_s), grace_s + _PATIENCE_S)

    async def _stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def serve_aio(
    service: str,
    add: Callable[[Any], None],
    host: str,
    port: int,
    max_calls: int,
    message_bytes: int,
    streams: int,
    credentials: grpc.ServerCredentials | None = None,
    secret: str | None = None,
) -> RunningAioServer:
    """Starts a server for one service plus health and reflection.

    Args:
        service: Full name in the contract ("eaas.rpc.v1.MonitorService").
        add: Adds its handlers to a server; they are coroutines.
        host: Name or address to listen on; "0.0.0.0" or "::" is every interface.
        port: 0 takes a free one (see `RunningAioServer.address`).
        max_calls: Calls at a time; a stream counts for as long as it lives. More are refused with
            RESOURCE_EXHAUSTED at once.
        message_bytes: Larger messages are refused with RESOURCE_EXHAUSTED, too.
        streams: Calls at a time on one connection; more wait at their sender.
        credentials: For TLS; None: plain text.
        secret: What calls have to show (see `eaas.server_records`); None: nothing.

    Raises:
        PortInUseError: Another process holds the port.
        ConfigError: The host is not one of this machine, the port needs more rights, or the secret cannot be
            left for this user's other processes.
    """

    async def start() -> RunningAioServer:
        # gRPC itself refuses calls by chance once 1,000 of them wait to be looked at: so many members may
        # begin to watch at the same moment.
        options = [
            *server_options(message_bytes, streams),
            ("grpc.server.max_pending_requests", max_calls),
            ("grpc.server.max_pending_requests_hard_limit", max_calls),
        ]
        server = grpc.aio.server(
            interceptors=(AioSecretGuard(secret),) if secret else (),
            options=options,
            maximum_concurrent_rpcs=max_calls,
        )
        add(server)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        reflection.enable_server_reflection(
            (service, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        address = add_port(server, host, port, credentials, secret, keep=True)
        await server.start()
        loop = asyncio.get_running_loop()
        running = RunningAioServer(server, health_servicer, service, address, loop)
        await running._set_serving(False)
        return running

    return run_on_loop(start(), _PATIENCE_S)
