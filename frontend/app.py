"""The frontend's HTTP application: OpenAI's API over engines, cluster state, the dashboard."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eaas import __version__
from eaas.generation.work import Engine
from frontend.access import Access, Cors
from frontend.dashboard.mount import Dashboard
from frontend.defaults import ModelFiles
from frontend.errors import ERROR_HANDLERS
from frontend.families.family import Family
from frontend.guard import MORE_SEQUENCES, RequestGuard
from frontend.limits import ServeLimits
from frontend.metrics import ServeMetrics
from frontend.openapi import openapi_document
from frontend.prompts.anthropic_body import CountRequest
from frontend.prompts.bodies import DetokenizeRequest, TokenizeRequest
from frontend.prompts.reader import missing_template
from frontend.requests.completions import ChatHandler, TextHandler
from frontend.requests.messages import MessagesHandler
from frontend.requests.responses import ResponsesHandler, StoredResponses
from frontend.requests.service import More, Service
from frontend.tracing import RequestTraces

__all__ = ["build_app"]

_Answer = Callable[[bytes, More], Awaitable[Response]]
_AT_ONCE = 8192  # tokens that are written in one step; a thread takes the steps


def build_app(
    engine: Engine,
    files: ModelFiles,
    *,
    names: Sequence[str],
    unlisted: Sequence[str] = (),
    status: Callable[[], dict[str, Any]],
    healthy: Callable[[], tuple[bool, str]],
    limits: ServeLimits,
    access: Access,
    registry: CollectorRegistry | None = None,
    origins: Sequence[str] = (),
    traces: RequestTraces | None = None,
    dashboard: Dashboard | None = None,
    response_template: str | None = None,
) -> Starlette:
    """Build the HTTP application of a model. The engine runs as long as the application.

    Args:
        engine: Generates the tokens of requests.
        files: The model's tokenizer and settings.
        names: Its names in the API, the main one first.
        unlisted: Further names that requests may use, which /v1/models leaves out.
        status: Returns the content of /eaas/v1/status. Called in a worker thread.
        healthy: Returns whether the cluster can serve, and the reason if not. Called in a worker thread.
        limits: Limits of requests.
        access: Decides which requests may pass.
        registry: The metrics of /metrics; the application adds its own.
        origins: The origins of web pages that may use the endpoint (CORS), or "*".
        traces: Records each request; None: no tracing.
        dashboard: Serves the page at `/`; None: no page.
        response_template: A family of models, or a file, that tells how answers are written; None: what the
            tokenizer tells.

    Raises:
        CheckpointError: generation_config.json has a value that no request may have.
        ConfigError: There is no such response template.
    """
    tokenizer = files.tokenizer
    metrics = ServeMetrics(registry if registry is not None else CollectorRegistry(), traces)
    metrics.watch(engine, names[0])
    family = Family.of(tokenizer, response_template)
    service = Service(files, names, unlisted, engine, limits, metrics, family)
    chat, text = ChatHandler(service), TextHandler(service)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield
        service.shutdown()

    app = Starlette(lifespan=lifespan, exception_handlers=ERROR_HANDLERS)
    _add_routes(app, service, status, healthy)
    stored = StoredResponses(limits)
    post: dict[str, _Answer] = {
        "/v1/chat/completions": chat.handle_request,
        "/v1/completions": text.handle_request,
        "/v1/messages": MessagesHandler(service).handle_request,
        "/v1/messages/count_tokens": partial(_count_tokens, service),
        "/v1/responses": ResponsesHandler(service, stored).handle_request,
        "/tokenize": partial(_tokenize, service),
        "/detokenize": partial(_detokenize, service),
    }
    for path, answer in post.items():
        _add_post(app, path, answer)
    _add_stored(app, stored)
    if dashboard is not None:
        has_chat = not missing_template(tokenizer)
        dashboard.serve(names[0], has_chat=has_chat, names_servers=True)
        app.router.routes.append(dashboard)
    app.add_middleware(
        RequestGuard,
        paths={each.path: each.methods or () for each in app.routes if isinstance(each, Route)},
        limits=limits,
        metrics=metrics,
        access=access,
    )
    if origins:
        app.add_middleware(Cors, origins=origins, access=access)
    app.state.end_requests = service.shutdown
    app.state.close_pages = dashboard.close if dashboard is not None else None
    return app


def _add_post(app: Starlette, path: str, answer: _Answer) -> None:
    async def response(request: Request) -> Response:
        # `request.body()` would keep the body in memory until the answer is complete.
        body = b"".join([part async for part in request.stream()])
        return await answer(body, request.scope[MORE_SEQUENCES])

    app.add_route(path, response, methods=["POST"])


def _add_stored(app: Starlette, stored: StoredResponses) -> None:
    # Not in threads: the store is used on the event loop.
    async def response(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method != "DELETE":
            return Response(stored.get(name), media_type="application/json")
        stored.remove(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    app.add_route("/v1/responses/{name}", response, methods=["GET", "DELETE"])


def _add_routes(
    app: Starlette,
    service: Service,
    status: Callable[[], dict[str, Any]],
    healthy: Callable[[], tuple[bool, str]],
) -> None:
    # Starlette adds HEAD to GET; functions that are not async run in threads.
    async def models(_request: Request) -> Response:
        cards = [service.card(name) for name in service.names]
        return JSONResponse({"object": "list", "data": cards})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_name(name)
        return JSONResponse(service.card(name))

    # Not the cluster: a restart of this process brings no expert back.
    def live(_request: Request) -> Response:
        failure = service.engine.failure()
        return _health(failure is None, f"engine: {failure}")

    def health(request: Request) -> Response:
        failed = service.engine.failure() is not None
        return live(request) if failed else _health(*healthy())

    def metrics(_request: Request) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_route("/v1/models", models, methods=["GET", "OPTIONS"])
    app.add_route("/v1/models/{name:path}", one_model)
    app.add_route("/version", lambda _: JSONResponse({"version": __version__}))
    app.add_route("/health", health)
    app.add_route("/ping", health, methods=["GET", "POST"])
    app.add_route("/live", live)
    app.add_route("/metrics", metrics)
    app.add_route("/eaas/v1/status", lambda _: JSONResponse(status()))
    app.add_route("/openapi.json", lambda _: JSONResponse(openapi_document()))


def _health(good: bool, reason: str) -> Response:
    if good:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unhealthy", "reason": reason}, status_code=503)


async def _tokenize(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the tokens of a text or of chat messages, which may be millions. Raises ApiError."""
    request, (found,) = await service.read(TokenizeRequest, body)
    # A list of numbers takes nine times the memory, for as long as the client reads.
    tokens = array("I", found)
    del found
    texts: Iterator[str] = iter(["null"])
    if request.return_token_strs:
        texts = chain("[", _items(tokens, service.tokenizer.convert_ids_to_tokens), "]")
    head = f'{{"count":{len(tokens)},"max_model_len":{service.max_model_len},"tokens":['
    content = chain([head], _items(tokens, list), ['],"token_strs":'], texts, "}")
    headers = request.ignored_header
    return StreamingResponse(content, headers=headers, media_type="application/json")


def _items(tokens: Sequence[int], convert: Any) -> Iterator[str]:
    """Yield the items of a JSON list in parts, because each part holds the interpreter's lock."""
    for begin in range(0, len(tokens), _AT_ONCE):
        part = json.dumps(convert(list(tokens[begin : begin + _AT_ONCE])), separators=(",", ":"))
        yield f"{',' if begin else ''}{part[1:-1]}"


async def _detokenize(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the text of tokens. Raises ApiError."""
    request, _ = await service.read(DetokenizeRequest, body)
    return JSONResponse({"prompt": request.found["text"]}, headers=request.ignored_header)


async def _count_tokens(service: Service, body: bytes, _more: More) -> Response:
    """Answer with the number of tokens of chat messages. Raises ApiError."""
    request, (tokens,) = await service.read(CountRequest, body)
    return JSONResponse({"input_tokens": len(tokens)}, headers=request.ignored_header)
