"""ASGI middleware of vLLM's API server: checks each request, and answers what vLLM does not have."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_client.engines.vllm.logs import log_with_vllm
from attention_client.vllm_server.metrics import metrics_page
from attention_client.vllm_server.settings import EndpointSettings
from eaas.control_plane.observer import ClusterObserver
from eaas.net.api_keys import ApiKeys
from eaas.net.grpc_server import host_to_tell, join_host_port
from eaas.net.http_access import HttpAccess, known_hosts
from eaas.net.tls import Identity
from eaas.types import Role

__all__ = ["Endpoint"]

_STATUS = "/eaas/v1/status"
_METRICS = "/metrics"
# WebSocket: policy violation. Before the handshake it becomes HTTP 403.
_REFUSED = 1008


class Endpoint:
    """Serves the cluster's status and the workers' metrics beside vLLM's API.

    vLLM makes it, by the name in `--middleware`. It stands before all of vLLM's own middleware.

    Args:
        app: vLLM's application.

    Raises:
        ConfigError: vLLM was not started by `eaas vllm`; keys or certificates cannot be used.
    """

    def __init__(self, app: ASGIApp) -> None:
        log_with_vllm()
        self._app = app
        settings = EndpointSettings.of_environment()
        self._access = HttpAccess(
            ApiKeys.of(settings.api_key_file), known_hosts(settings.host, settings.allowed_hosts)
        )
        tls = None
        if settings.tls_dir:
            tls = Identity(Path(settings.tls_dir), Role.ATTENTION_CLIENT.value)
        self._tls = tls
        self._observer = ClusterObserver(settings.monitor, tls)
        self._address = join_host_port(host_to_tell(settings.host), settings.port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for one of our paths; leave the others to vLLM, if they may pass."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            # A WebSocket may do anything, so its Origin is checked as that of a POST.
            if self._access.error({**scope, "method": "POST"}) is None:
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": _REFUSED})
        else:
            await self._app(scope, self._closes_at_end(receive), send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._access.error(scope)
        if error is not None:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
            return
        path, reads = scope["path"], scope["method"] in ("GET", "HEAD")
        if path == _STATUS and reads:
            await (await self._status())(scope, receive, send)
        elif path == _METRICS and reads:
            page = await metrics_page(self._app, scope, self._observer, self._address)
            await page(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _status(self) -> JSONResponse:
        loop, url = asyncio.get_running_loop(), f"http://{self._address}"
        document = await loop.run_in_executor(None, self._observer.status, url)
        return JSONResponse(document | {"tls": self._tls is not None})

    def _closes_at_end(self, receive: Receive) -> Receive:
        async def watched() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await asyncio.get_running_loop().run_in_executor(None, self._observer.close)
            return message

        return watched
