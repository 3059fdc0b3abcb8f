"""ASGI middleware of vLLM's API server: checks each request, and answers what vLLM does not have."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from attention_client.engines.vllm.logs import log_with_vllm
from attention_client.observer import ClusterObserver
from attention_client.serving.access import Access
from attention_client.serving.dashboard.build import build_dashboard
from attention_client.serving.dashboard.mount import Dashboard
from attention_client.serving.dashboard.viewers import is_page_path
from attention_client.vllm_server.metrics import metrics_page
from attention_client.vllm_server.settings import EndpointSettings
from eaas.cluster_snapshot.counters import Counters, read_counters
from eaas.errors import ClusterError
from eaas.net.api_keys import ApiKeys
from eaas.net.grpc_server import host_to_tell, join_host_port
from eaas.net.listen_policy import only_here
from eaas.net.tls import Identity
from eaas.types import Role

__all__ = ["Endpoint"]

_STATUS = "/eaas/v1/status"
_METRICS = "/metrics"
# WebSocket: policy violation. Before the handshake it becomes HTTP 403.
_REFUSED = 1008


class Endpoint:
    """Serves the cluster's status, the dashboard and the workers' metrics beside vLLM's API.

    vLLM makes it, by the name in `--middleware`. It stands before all of vLLM's own middleware.

    Args:
        app: vLLM's application.

    Raises:
        ConfigError: vLLM was not started by `eaas vllm`; keys or certificates cannot be used.
    """

    def __init__(self, app: ASGIApp) -> None:
        log_with_vllm()
        self._app = app
        self._settings = settings = EndpointSettings.of_environment()
        here = only_here(settings.host)
        keys = ApiKeys.of(settings.api_key_file)
        hosts = (settings.host, *settings.allowed_hosts) if here else None
        self._access = Access(keys, hosts)
        tls = None
        if settings.tls_dir:
            tls = Identity(Path(settings.tls_dir), Role.ATTENTION_CLIENT.value)
        self._tls = tls
        self._observer = ClusterObserver(settings.monitor, tls)
        self._address = join_host_port(host_to_tell(settings.host), settings.port)
        self._dashboard: Dashboard | None = None
        if settings.dashboard:
            self._dashboard = build_dashboard(
                settings.monitor,
                settings.host,
                settings.port,
                self._observer.members,
                self._counters,
                tls,
                keys,
                operator_page=settings.operator_page,
            )
            self._dashboard.serve(settings.model, has_chat=settings.chat, names_servers=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for one of our paths; leave the others to vLLM, if they may pass."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            # A WebSocket may do anything, so its Origin is checked as that of a POST.
            if self._access.refusal({**scope, "method": "POST"}) is None:
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": _REFUSED})
        else:
            await self._app(scope, self._closes_at_end(receive), send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._access.refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        path, reads = scope["path"], scope["method"] in ("GET", "HEAD")
        if path == _STATUS and reads:
            await (await self._status())(scope, receive, send)
        elif path == _METRICS and reads:
            page = await metrics_page(self._app, scope, self._observer, self._address)
            await page(scope, receive, send)
        elif self._dashboard is not None and is_page_path(path):
            await self._dashboard.handle(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _status(self) -> JSONResponse:
        loop, url = asyncio.get_running_loop(), f"http://{self._address}"
        document = await loop.run_in_executor(None, self._observer.status, url)
        return JSONResponse(document | {"tls": self._tls is not None})

    def _counters(self, timeout_s: float) -> Counters:
        """Read the endpoint's own /metrics, in the dashboard's thread."""
        host = self._settings.host.strip("[]")
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://{join_host_port(own, self._settings.port)}{_METRICS}"
        try:
            answer = httpx.get(url, timeout=timeout_s, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise ClusterError(str(error) or type(error).__name__) from error
        return read_counters(answer.text)

    # -- the end -----------------------------------------------------------------------------------------

    def _closes_at_end(self, receive: Receive) -> Receive:
        async def watched() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                if self._dashboard is not None:
                    await self._dashboard.close()
                await asyncio.get_running_loop().run_in_executor(None, self._observer.close)
            return message

        return watched
