"""A gRPC server for very many streams (the monitor's), whose handlers are coroutines of one thread.

It suits services whose streams mostly wait, because a busy handler blocks all the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eaas.net.grpc_loop import run_on_loop
from eaas.net.grpc_secret import AioSecretGuard
from eaas.net.grpc_server import add_port, server_options

__all__ = ["RunningAioServer", "serve_aio"]

# Time added to the grace period of a stop, because thousands of streams take time to end.
_PATIENCE_S = 10.0


class RunningAioServer:
    """A running coroutine server. Its health is NOT_SERVING until `set_serving(True)`.

    Any thread except that of `loop` may call its methods.

    Attributes:
        address: See `eaas.net.grpc_server.RunningServer`.
        loop: Runs the handlers.
        serving: The health that probes get.
    """

    serving = False

    def __init__(
        self, server: Any, health_servicer: Any, service: str, address: str, loop: Any
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._services = ("", service)
        self.address = address
        self.loop: asyncio.AbstractEventLoop = loop

    def set_serving(self, serving: bool) -> None:
        """Set the health that probes get, of the whole server ("") and its service: True while it leads."""
        run_on_loop(self._set_serving(serving), _PATIENCE_S)

    async def _set_serving(self, serving: bool) -> None:
        self.serving = serving
        status = health_pb2.HealthCheckResponse
        for name in self._services:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def stop(self, grace_s: float) -> None:
        """Stop the server: refuse new calls, and cancel running ones after `grace_s` seconds. Blocks."""
        run_on_loop(self._stop(grace_s), grace_s + _PATIENCE_S)

    async def _stop(self, grace_s: float) -> None:
        self.serving = False
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
    """Start a coroutine server with one service, health and reflection (see `eaas.net.grpc_server.serve`).

    Args:
        service: Full name ("eaas.rpc.v1.MonitorService").
        add: Adds the service's handlers (coroutines) to a server.
        max_calls: Concurrent calls, running streams included. More are refused with RESOURCE_EXHAUSTED.
        streams: Concurrent calls per connection; more wait at the client.
    """

    async def start() -> RunningAioServer:
        # By default gRPC refuses calls at random once 1,000 are pending, and that many members may connect at
        # the same moment.
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
