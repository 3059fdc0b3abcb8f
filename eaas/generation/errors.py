"""The exceptions that end a request: one that the client caused or may repeat, and an engine's end."""

from __future__ import annotations

import logging

from eaas.errors import EaasError

__all__ = ["ApiError", "EngineStoppedError", "as_api_error"]

_LOG = logging.getLogger(__name__)

# A message may quote megabytes that the client sent.
_LONGEST = 2000

_TYPES = {
    404: "not_found_error",
    429: "overloaded_error",
    500: "internal_error",
    503: "service_unavailable",
}


class EngineStoppedError(Exception):
    """The engine has stopped, and every request that it had ends."""


def _shortened(text: str) -> str:
    # Half of a surrogate pair cannot be sent.
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class ApiError(Exception):
    """An error answer. Handlers raise it; the client reads the message.

    Args:
        status: HTTP status.
        message: The cause and the remedy.
        type: OpenAI's error type; by default the usual type of the status.
        param: The request field at fault; None: no single field.
        code: Short name of the cause, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shortened(message)
        self.type = type or _TYPES.get(status, "invalid_request_error")
        self.param = param and _shortened(param)
        self.code = code

    @classmethod
    def invalid(cls, param: str, message: str, code: str = "invalid_value") -> ApiError:
        """Make the error (400) of a request field with a wrong value."""
        return cls(400, message, param=param, code=code)

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON object of the error answer. All its strings are valid UTF-8."""
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": fields | {"code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception of the engine or the model to an HTTP error: 503, or 500 if it is unexpected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EaasError):
        return ApiError(503, str(error), type="experts_unavailable", code="experts_unavailable")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="engine_stopped")
    _LOG.error("generation failed", exc_info=error)
    return ApiError(500, f"The model failed: {type(error).__name__}: {error}", code="model_error")
