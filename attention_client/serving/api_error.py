"""The exception that becomes an HTTP answer in OpenAI's error form.

This module imports nothing slow: the prompt worker process imports it.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

__all__ = ["ApiError"]

# A message may quote megabytes that the client sent.
_LONGEST = 2000

_TYPES = {
    404: "not_found_error",
    429: "overloaded_error",
    500: "internal_error",
    503: "service_unavailable",
}
_ANTHROPIC_PATHS = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


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

    def anthropic_body(self) -> dict[str, Any]:
        """Return the JSON object of the error answer in the form of Anthropic's API."""
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        message = self.message
        if self.code == "context_length_exceeded":
            # By these words Claude Code knows that it must shorten the history.
            message = f"prompt is too long: {message}"
        error = {"type": _ANTHROPIC_TYPES.get(self.status, kind), "message": message}
        return {"type": "error", "error": error}

    def response(self, path: str = "") -> JSONResponse:
        """Return the error as an HTTP answer in the form of the API that has the path.

        For 429 and 503 it asks the client to try again after 1 s.
        """
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        if self.status == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        body = self.anthropic_body() if path.startswith(_ANTHROPIC_PATHS) else self.body()
        return JSONResponse(body, self.status, headers)

    def sse(self) -> str:
        """Return the error as a server-sent event, for a stream that has begun."""
        return f"data: {json.dumps(self.body())}\n\n"
