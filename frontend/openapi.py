"""The endpoint's paths in one table, and its OpenAPI 3.1 document, at /openapi.json, which is made from it.

The request schemas come from the classes that validate the requests; tests send requests that they allow and
requests that they forbid.
"""

from __future__ import annotations

import functools
from http import HTTPStatus
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from eaas import __version__
from frontend.prompts.anthropic_body import CountBody, MessagesBody
from frontend.prompts.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from frontend.prompts.responses_body import ResponsesBody

__all__ = ["openapi_document"]

_REFERENCE = "#/components/schemas/"
_ANY_BODY = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_GENERATION = "Generate text; stream: true sends server-sent events."
_STORED = "/v1/responses/{name}"


class _Operation(NamedTuple):
    """What a client can ask of the endpoint.

    Attributes:
        method: HTTP method, in lower case.
        path: The URL's path, with the parameter {name} or none.
        summary: What it does.
        body: Validates its JSON body; None: it has none.
        errors: The statuses of its failures; without 401 it needs no key.
    """

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None = None
    errors: tuple[int, ...] = (401,)


_OPERATIONS = (
    _Operation("post", "/v1/completions", _GENERATION, CompletionRequest, _ANY_BODY),
    _Operation("post", "/v1/chat/completions", _GENERATION, ChatRequest, _ANY_BODY),
    _Operation("post", "/v1/responses", _GENERATION, ResponsesBody, _ANY_BODY),
    _Operation("get", _STORED, "Get a stored response.", errors=(401, 404)),
    _Operation("delete", _STORED, "Forget a stored response.", errors=(401, 404)),
    _Operation("post", "/v1/messages", _GENERATION, MessagesBody, _ANY_BODY),
    _Operation(
        "post", "/v1/messages/count_tokens", "Count a prompt's tokens.", CountBody, _ANY_BODY
    ),
    _Operation("post", "/tokenize", "Get the tokens of a prompt.", TokenizeRequest, _ANY_BODY),
    _Operation("post", "/detokenize", "Get the text of tokens.", DetokenizeRequest, _ANY_BODY),
    _Operation("get", "/v1/models", "List the served model."),
    _Operation("get", "/v1/models/{name}", "Get a model by name.", errors=(401, 404)),
    _Operation("get", "/eaas/v1/status", "Get the members of the cluster."),
    _Operation("get", "/version", "Get the version of this software."),
    _Operation("get", "/health", "Check that every expert is reachable.", errors=(503,)),
    _Operation("get", "/ping", "Check that every expert is reachable.", errors=(503,)),
    _Operation("post", "/ping", "Check that every expert is reachable.", errors=(503,)),
    _Operation("get", "/live", "Check that the engine runs.", errors=(503,)),
    _Operation("get", "/metrics", "Get Prometheus metrics.", errors=()),
)


@functools.cache
def openapi_document() -> dict[str, Any]:
    """Build the OpenAPI document of the HTTP endpoint, at the first request for it."""
    bodies = [(each.body, "validation") for each in _OPERATIONS if each.body is not None]
    _, schemas = models_json_schema(bodies, ref_template=_REFERENCE + "{model}")  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for each in _OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _described(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Expert-as-a-Service", "version": __version__},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: _Operation) -> dict[str, Any]:
    statuses = {
        str(status): {"description": HTTPStatus(status).phrase}
        for status in (200, *operation.errors)
    }
    fields: dict[str, Any] = {"summary": operation.summary, "responses": statuses}
    if operation.body is not None:
        schema = {"$ref": _REFERENCE + operation.body.__name__}
        content = {"application/json": {"schema": schema}}
        fields["requestBody"] = {"required": True, "content": content}
    if "{name}" in operation.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        fields["parameters"] = [name]
    return fields if 401 in operation.errors else fields | {"security": []}
