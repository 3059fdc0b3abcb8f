"""OpenAI's error form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import CBWorkerDeadError

from attention_client.serve.api_error import ApiError
from eaas.errors import EaasError

__all__ = ["ApiError", "as_api_error", "install_error_handlers"]

_LOG = logging.getLogger(__name__)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception of the engine or the model."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EaasError):
        return ApiError(503, str(error), type="experts_unavailable", code="experts_unavailable")
    if isinstance(error, CBWorkerDeadError):
        return ApiError(503, str(error), code="engine_stopped")
    _LOG.error("generation failed", exc_info=error)
    return ApiError(500, f"The model failed: {type(error).__name__}: {error}", code="model_error")


def _of_http(error: HTTPException) -> ApiError:
    messages = {404: "No such URL.", 405: "This URL does not answer to this method."}
    return ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))


def _of_validation(error: RequestValidationError) -> ApiError:
    # The only thing that FastAPI itself validates here is that the body is a JSON object.
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")
    return ApiError(400, "The body must be a JSON object.", code="invalid_json")


def install_error_handlers(app: FastAPI) -> None:
    """Answers every exception of an application in OpenAI's form."""

    async def answer(_request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            return _of_http(error).response()
        if isinstance(error, RequestValidationError):
            return _of_validation(error).response()
        return as_api_error(error).response()

    for cls in (
        ApiError,
        CBWorkerDeadError,
        EaasError,
        HTTPException,
        RequestValidationError,
        Exception,
    ):
        app.add_exception_handler(cls, answer)
