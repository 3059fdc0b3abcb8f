"""The endpoint's OpenAPI 3.1 document, at /openapi.json.

The request schemas come from the classes that validate the requests. The rest is written by hand; tests send
requests that it allows and requests that it forbids.
"""

from __future__ import annotations

import functools
from typing import Any

from pydantic.json_schema import models_json_schema

from attention_client.serving.prompts.anthropic_body import CountBody, MessagesBody
from attention_client.serving.prompts.bodies import ChatRequest, CompletionRequest
from attention_client.serving.prompts.responses_body import ResponsesBody
from attention_client.serving.prompts.tokenize_bodies import DetokenizeRequest, TokenizeRequest
from eaas import __version__

__all__ = ["openapi_document"]

_REFERENCE = "#/components/schemas/"
_REQUESTS = (
    CompletionRequest,
    ChatRequest,
    ResponsesBody,
    MessagesBody,
    CountBody,
    TokenizeRequest,
    DetokenizeRequest,
)
_STRING, _INTEGER, _OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_LOGPROBS = {"type": ["object", "null"]}


def _record(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list_of(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_USAGE = _record(prompt_tokens=_INTEGER, completion_tokens=_INTEGER, total_tokens=_INTEGER)


def _generated(kind: str, **content: Any) -> dict[str, Any]:
    finish = {"enum": ["stop", "length", "tool_calls"]}
    return _record(
        id=_STRING,
        object={"const": kind},
        created=_INTEGER,
        model=_STRING,
        choices=_list_of(
            _record(index=_INTEGER, **content, logprobs=_LOGPROBS, finish_reason=finish)
        ),
        usage=_USAGE,
    )


_SCHEMAS = {
    "Error": _record(
        error=_record(message=_STRING, type=_STRING, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)
    ),
    "Completion": _generated("text_completion", text=_STRING),
    "ChatCompletion": _generated("chat.completion", message=_record(role={"const": "assistant"})),
    "Model": _record(
        id=_STRING,
        object={"const": "model"},
        created=_INTEGER,
        owned_by=_STRING,
        max_model_len=_INTEGER,
    ),
    "Models": _record(object={"const": "list"}, data=_list_of({"$ref": f"{_REFERENCE}Model"})),
    "Response": _record(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        status={"enum": ["completed", "incomplete"]},
        model=_STRING,
        output=_list_of(_OBJECT),
        usage=_OBJECT,
    ),
    "Deletion": _record(id=_STRING, object={"const": "response"}, deleted={"const": True}),
    "Message": _record(
        id=_STRING,
        type={"const": "message"},
        model=_STRING,
        content=_list_of(_OBJECT),
        stop_reason=_STRING,
        usage=_OBJECT,
    ),
    "MessageError": _record(type={"const": "error"}, error=_record(type=_STRING, message=_STRING)),
    "TokenCount": _record(input_tokens=_INTEGER),
    "Tokens": _record(
        count=_INTEGER,
        max_model_len=_INTEGER,
        tokens=_list_of(_INTEGER),
        token_strs={"type": ["array", "null"], "items": _STRING},
    ),
    "Text": _record(prompt=_STRING),
    "Version": _record(version=_STRING),
    "Status": _record(epoch=_INTEGER, members=_list_of(_OBJECT)),
    "Healthy": _record(status={"const": "ok"}),
    "Unhealthy": _record(status={"const": "unhealthy"}, reason=_STRING),
}


_NAME = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": _STRING}]}


@functools.cache
def openapi_document() -> dict[str, Any]:
    """Build the OpenAPI document of the HTTP endpoint, at the first request for it."""
    _, schemas = models_json_schema(
        [(cls, "validation") for cls in _REQUESTS], ref_template=_REFERENCE + "{model}"
    )
    health = _get(
        "Check that every expert is reachable.",
        _json("Healthy"),
        {"503": _answer("The cluster cannot serve.", _json("Unhealthy"))},
    )
    no_response = {"401": _error("No valid API key."), "404": _error("No such response.")}
    stored = _get("Get a stored response.", _json("Response"), no_response)
    removed = _get("Forget a stored response.", _json("Deletion"), no_response)
    no_model = {"401": _error("No valid API key."), "404": _error("No such model.")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Expert-as-a-Service", "version": __version__},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": _generation("CompletionRequest", "Completion"),
            "/v1/chat/completions": _generation("ChatRequest", "ChatCompletion"),
            "/v1/responses": _generation("ResponsesBody", "Response"),
            "/v1/responses/{name}": stored | {"delete": removed["get"]} | _NAME,
            "/v1/messages": _generation("MessagesBody", "Message", "MessageError"),
            "/v1/messages/count_tokens": _post(
                "Count the tokens of a prompt.", "CountBody", _json("TokenCount"), "MessageError"
            ),
            "/tokenize": _post("Get the tokens of a prompt.", "TokenizeRequest", _json("Tokens")),
            "/detokenize": _post("Get the text of tokens.", "DetokenizeRequest", _json("Text")),
            "/v1/models": _get("List the served model.", _json("Models")),
            "/v1/models/{name}": _get("Get a model by name.", _json("Model"), no_model) | _NAME,
            "/eaas/v1/status": _get("Get the members of the cluster.", _json("Status")),
            "/version": _get("Get the version of this software.", _json("Version")),
            "/health": health,
            "/live": health,
            "/ping": health | {"post": health["get"]},
            "/metrics": _get("Get Prometheus metrics.", {"text/plain": {}}, {}),
        },
        "components": {
            "schemas": _SCHEMAS | schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE + schema}}}


def _answer(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": content}


def _error(description: str, schema: str = "Error") -> dict[str, Any]:
    return _answer(description, _json(schema))


def _get(
    summary: str, content: dict[str, Any], errors: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Describe a GET operation; `errors` are its answers beside 200. Without 401 it needs no key."""
    errors = {"401": _error("No valid API key.")} if errors is None else errors
    operation = {"summary": summary, "responses": {"200": _answer("Success.", content)} | errors}
    return {"get": operation if "401" in errors else operation | {"security": []}}


_FAILURES = {
    "400": "The body is invalid; the message names the field.",
    "401": "No valid API key.",
    "404": "This endpoint serves another model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The Content-Type is not application/json.",
    "429": "Too many requests. Try again later.",
    "500": "The model failed.",
    "503": "Experts are unreachable, or the engine has stopped.",
}


def _generation(request: str, answer: str, error: str = "Error") -> dict[str, Any]:
    summary = "Generate text; stream: true sends server-sent events."
    return _post(summary, request, _json(answer) | {"text/event-stream": {}}, error)


def _post(
    summary: str, request: str, content: dict[str, Any], error: str = "Error"
) -> dict[str, Any]:
    ignored = {"description": "Unknown fields, which were ignored.", "schema": _STRING}
    answer = _answer("The answer.", content) | {"headers": {"X-Eaas-Ignored-Fields": ignored}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(request)},
            "responses": {"200": answer}
            | {status: _error(reason, error) for status, reason in _FAILURES.items()},
        }
    }
