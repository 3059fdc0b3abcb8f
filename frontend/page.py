"""A frontend without engines: the dashboard of a cluster whose API vLLM's server serves at its own address.

It answers the page and the cluster's status, and passes on to vLLM what the page and `eaas top` ask of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from eaas import __version__
from eaas.cluster_snapshot.counters import Counters, read_counters
from eaas.errors import ClusterError
from eaas.generation.errors import ApiError
from eaas.log import one_line
from eaas.membership.session import MembershipView
from eaas.types import MemberState, Role
from frontend.access import Access
from frontend.dashboard.mount import Dashboard
from frontend.errors import ERROR_HANDLERS, error_event, error_response
from frontend.guard import RequestGuard
from frontend.limits import ServeLimits
from frontend.metrics import ServeMetrics
from frontend.process import FrontendProcess

__all__ = ["VllmServer", "build_page_app", "run_page"]

# What the page, `eaas top`, `eaas generate` and probes ask of vLLM.
_READ = ("/health", "/metrics", "/v1/models")
_POSTED = ("/v1/chat/completions", "/v1/completions")
_METHODS = ["GET", "POST", "DELETE"]
_SENT = ("authorization", "x-api-key", "content-type", "sec-fetch-site")
_RETURNED = (b"content-type", b"retry-after")
_LIMITS = ServeLimits(max_requests=64)
# Beside the requests: probes and readings of the metrics.
_CONNECTIONS = _LIMITS.max_requests + 16
# Shorter than vLLM keeps an idle connection (5 s), so that no request is sent into one that it closes.
_IDLE_S = 2.0
# A batch of vLLM may wait long for experts.
_TIMEOUT = httpx.Timeout(5.0, read=300.0)


class VllmServer:
    """vLLM's HTTP server, as an ASGI application that passes requests on to it."""

    def __init__(self) -> None:
        self._address = ""
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Deadlines of the running requests, which only `end` sets.
        self._running: set[asyncio.Timeout] = set()

    @property
    def requests(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def url(self) -> str:
        """URL of vLLM's server. Raises ClusterError: no vLLM is a member of the cluster."""
        if not self._address:
            raise ClusterError("no vLLM runs in this cluster: start it with `eaas vllm`")
        return f"http://{self._address}"

    def follow(self, view: MembershipView) -> None:
        """Find vLLM's address in a view of the members: that of its workers, which are no engines of ours."""
        clients = view.live(Role.ATTENTION_CLIENT)
        found = [member for member in clients if member.address and not member.engine_address]
        found.sort(key=lambda member: member.state is not MemberState.SERVING)
        self._address = found[0].address if found else ""

    def counters(self, timeout_s: float) -> Counters:
        """Read the counters of vLLM's /metrics, for the dashboard. Raises ClusterError."""
        try:
            answer = httpx.get(f"{self.url}/metrics", timeout=timeout_s, trust_env=False)
            return read_counters(answer.raise_for_status().text)
        except httpx.HTTPError as error:
            raise ClusterError(f"vLLM does not answer: {one_line(error)}") from error

    @asynccontextmanager
    async def connections(self, _app: Starlette) -> AsyncIterator[None]:
        """Keep connections to vLLM for as long as the application runs."""
        self._loop = asyncio.get_running_loop()
        limits = httpx.Limits(max_connections=_CONNECTIONS, keepalive_expiry=_IDLE_S)
        async with httpx.AsyncClient(
            limits=limits, timeout=_TIMEOUT, trust_env=False
        ) as self._http:
            yield

    def end(self) -> None:
        """Fail the running requests. Thread-safe."""

        def end() -> None:
            for deadline in self._running:
                if not deadline.expired():
                    deadline.reschedule(0)

        if self._loop is not None:
            self._loop.call_soon_threadsafe(end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back, part by part."""
        request, began = Request(scope, receive), False
        sent = {name: request.headers[name] for name in _SENT if name in request.headers}
        assert self._http is not None
        try:
            async with (
                self._deadline(),
                self._http.stream(
                    "POST" if request.method == "POST" else "GET",
                    f"{self.url}{request.url.path}",
                    content=await request.body(),
                    headers=sent | {"accept-encoding": "identity"},
                ) as answer,
            ):
                headers = [(k.lower(), v) for k, v in answer.headers.raw if k.lower() in _RETURNED]
                start = {"type": "http.response.start", "status": answer.status_code}
                began = True
                await send({**start, "headers": headers})
                async for part in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})
        except (ClusterError, httpx.HTTPError, TimeoutError) as error:
            why = "this frontend ends" if isinstance(error, TimeoutError) else one_line(error)
            failed = ApiError(503, f"vLLM does not answer: {why}")
            if not began:
                await error_response(failed)(scope, receive, send)
            else:
                last = error_event(failed).encode()
                await send({"type": "http.response.body", "body": last})

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as deadline:
            self._running.add(deadline)
            try:
                yield
            finally:
                self._running.remove(deadline)


def build_page_app(
    vllm: VllmServer,
    status: Callable[[], dict[str, Any]],
    access: Access,
    dashboard: Dashboard | None,
) -> Starlette:
    """Build the HTTP application of a page whose API is vLLM's.

    Args:
        vllm: vLLM's server.
        status: Returns the content of /eaas/v1/status. Called in a worker thread.
        access: Decides which requests may pass.
        dashboard: The page; None: no page.
    """

    async def elsewhere(request: Request) -> Response:
        raise ApiError(
            404, f"{request.url.path[:200]} is not served here: vLLM's API is at {vllm.url}."
        )

    app = Starlette(lifespan=vllm.connections, exception_handlers=ERROR_HANDLERS)
    app.add_route("/eaas/v1/status", lambda _: JSONResponse(status()))
    app.add_route("/live", lambda _: JSONResponse({"status": "ok"}))
    app.add_route("/version", lambda _: JSONResponse({"version": __version__}))
    app.router.routes += [Route(path, vllm, methods=["GET"]) for path in _READ]
    app.router.routes += [Route(path, vllm, methods=["POST"]) for path in _POSTED]
    if dashboard is not None:
        app.router.routes.append(dashboard)
    app.add_middleware(
        RequestGuard,
        paths={each.path: each.methods or () for each in app.routes if isinstance(each, Route)},
        limits=_LIMITS,
        # vLLM's /metrics count the requests.
        metrics=ServeMetrics(CollectorRegistry()),
        access=access,
    )
    app.add_route("/{path:path}", elsewhere, methods=_METHODS)
    app.state.end_requests = vllm.end
    app.state.close_pages = dashboard.close if dashboard is not None else None
    return app


def run_page(process: FrontendProcess, model: Path | None) -> None:
    """Serve the page until a signal.

    Args:
        process: The process. It serves at once, also while vLLM does not.
        model: Directory of the checkpoint, whose name and template the page's chat uses; None: the settings
            have the name.

    Raises:
        PortInUseError: The endpoint's port is taken.
        ClusterError: The monitor cannot be reached.
    """
    vllm = VllmServer()

    def build(status: Callable[[], dict[str, Any]], dashboard: Dashboard | None) -> Starlette:
        if dashboard is not None:
            name = process.config.model_names(model or Path())[0]
            has_chat = model is None or _has_chat_template(model)
            dashboard.serve(name, has_chat=has_chat, names_servers=False)
        return build_page_app(vllm, status, process.access, dashboard)

    process.serve(
        build,
        _LIMITS,
        counters=vllm.counters,
        follow=vllm.follow,
        is_ready=lambda: True,
        requests=lambda: vllm.requests,
    )


def _has_chat_template(model: Path) -> bool:
    """Whether a checkpoint has a chat template; if not, the page's message is continued."""
    if (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file():
        return True
    try:
        return '"chat_template"' in (model / "tokenizer_config.json").read_text()
    except OSError:
        return False
