"""HTTP error answers in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match
from transformers.cli.serving.utils import CBWorkerDeadError

from attention_client.serving.api_error import ApiError
from eaas.errors import EaasError

__all__ = ["ERROR_HANDLERS", "ApiError", "as_api_error"]

_LOG = logging.getLogger(__name__)
# OpenAI's and vLLM's paths for what this endpoint does not do.
_OTHER_WORK = re.compile(
    r"/(embeddings|(re)?rank|score|classify|pooling|moderations|audio|images|videos|files|uploads|batches|"
    r"fine_tuning|assistants|threads|realtime)(/|$)"
)
_MOST_SEGMENTS = 8  # before what may be a path of ours


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception of the engine or the model to an HTTP error: 503, or 500 if it is unexpected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EaasError):
        return ApiError(503, str(error), type="experts_unavailable", code="experts_unavailable")
    if isinstance(error, CBWorkerDeadError):
        return ApiError(503, str(error), code="engine_stopped")
    _LOG.error("generation failed", exc_info=error)
    return ApiError(500, f"The model failed: {type(error).__name__}: {error}", code="model_error")


def _of_http(request: Request, error: HTTPException) -> JSONResponse:
    message, headers = str(error.detail), error.headers or {}
    if error.status_code == 404:
        message = f"No such URL: {request.url.path[:200]}. {_remedy(request)}"
    elif "Allow" in headers:
        message = f"{request.url.path[:200]} takes {headers['Allow']}, not {request.method}."
    response = ApiError(error.status_code, message).response(request.url.path)
    response.headers.update(headers)
    return response


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        return _of_http(request, error)
    return as_api_error(error).response(request.url.path)


ERROR_HANDLERS = dict.fromkeys(
    (ApiError, CBWorkerDeadError, EaasError, HTTPException, Exception), _answer
)
"""Make an HTTP application answer every exception in OpenAI's form."""


def _remedy(request: Request) -> str:
    """Return the advice for a request whose path matches no route, one sentence or two."""
    base = f"{request.base_url}v1"
    parts = request.url.path.strip("/").split("/")
    azure = " (OpenAI's client, not Azure's)" if parts[:2] == ["openai", "deployments"] else ""
    for first in range(min(len(parts), _MOST_SEGMENTS)):
        path = "/v1/" + "/".join(parts[first:])
        scope = {**request.scope, "path": path}
        if any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
            return f"Use {path}: set the client's base URL to {base}{azure}."
    if _OTHER_WORK.search(request.url.path):
        return "This server generates text and nothing else: use another server for this."
    if parts[0] == "api":
        return f"Ollama's API is not served: choose the client's OpenAI provider, with base URL {base}."
    return f"The API begins at {base}; {request.base_url}openapi.json lists all paths."
