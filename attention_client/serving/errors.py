"""HTTP error answers in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import CBWorkerDeadError

from attention_client.serving.api_error import ApiError
from eaas.errors import EaasError

__all__ = ["ApiError", "as_api_error", "install_error_handlers"]

_LOG = logging.getLogger(__name__)


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


def _of_http(error: HTTPException) -> ApiError:
    messages = {404: "No such URL.", 405: "This URL does not support this method."}
    return ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))


def install_error_handlers(app: FastAPI) -> None:
    """Make the HTTP application answer every exception in OpenAI's form. Called once, by `build_app`."""

    async def answer(_request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            return _of_http(error).response()
        return as_api_error(error).response()

    for cls in (ApiError, CBWorkerDeadError, EaasError, HTTPException, Exception):
        app.add_exception_handler(cls, answer)
