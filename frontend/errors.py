"""HTTP error answers in the forms of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match

from eaas.errors import EaasError
from eaas.generation.errors import ApiError, EngineStoppedError, as_api_error

__all__ = ["ERROR_HANDLERS", "anthropic_body", "error_event", "error_response"]

# OpenAI's and vLLM's paths for what this endpoint does not do.
_OTHER_WORK = re.compile(
    r"/(embeddings|(re)?rank|score|classify|pooling|moderations|audio|images|videos|files|uploads|batches|"
    r"fine_tuning|assistants|threads|realtime)(/|$)"
)
_MOST_SEGMENTS = 8  # before what may be a path of ours
_ANTHROPIC_PATHS = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON object of an error answer in the form of Anthropic's API."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if error.code == "context_length_exceeded":
        # By these words Claude Code knows that it must shorten the history.
        message = f"prompt is too long: {message}"
    found = {"type": _ANTHROPIC_TYPES.get(error.status, kind), "message": message}
    return {"type": "error", "error": found}


def error_response(error: ApiError, path: str = "") -> JSONResponse:
    """Return an error as an HTTP answer in the form of the API that has the path.

    For 429 and 503 it asks the client to try again after 1 s.
    """
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    body = anthropic_body(error) if path.startswith(_ANTHROPIC_PATHS) else error.body()
    return JSONResponse(body, error.status, headers)


def error_event(error: ApiError) -> str:
    """Return an error as a server-sent event, for a stream that has begun."""
    return f"data: {json.dumps(error.body())}\n\n"


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        return error_response(as_api_error(error), request.url.path)
    message, headers = str(error.detail), error.headers or {}
    if error.status_code == 404:
        message = f"No such URL: {request.url.path[:200]}. {_remedy(request)}"
    elif "Allow" in headers:
        message = f"{request.url.path[:200]} takes {headers['Allow']}, not {request.method}."
    response = error_response(ApiError(error.status_code, message), request.url.path)
    response.headers.update(headers)
    return response


ERROR_HANDLERS = dict.fromkeys(
    (ApiError, EngineStoppedError, EaasError, HTTPException, Exception), _answer
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
