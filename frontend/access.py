"""Access checks of every HTTP request, before any application, with the dashboard's password; CORS."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from eaas.net.http_access import HttpAccess
from frontend.dashboard.viewers import is_page_path
from frontend.errors import error_response

__all__ = ["Access", "Cors"]

# Headers of answers that a web page of another origin may read.
_EXPOSED = ("X-Request-Id", "X-Eaas-Ignored-Fields", "Retry-After")


class Access(HttpAccess):
    """Decides which requests may pass: the dashboard's may show an API key as a password."""

    def refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that must not pass; None: it may."""
        path = scope["path"]
        is_page = is_page_path(path)
        error = self.error(scope, takes_password=is_page)
        if error is None:
            return None
        if error.status != 401 or not is_page:
            return error_response(error, path)
        return PlainTextResponse(
            "The password is one of this endpoint's API keys; any user name will do.\n",
            status_code=401,
            headers={"WWW-Authenticate": 'Basic realm="Expert-as-a-Service", charset="UTF-8"'},
        )


class Cors(CORSMiddleware):
    """ASGI middleware: answers preflight requests and adds CORS headers to answers, errors too.

    It stands before the checks of keys, because a preflight request shows none. On loopback it acts only on
    requests that name a right host and origin, whatever the method; the guard refuses the others or answers
    without CORS headers. The dashboard stays closed to other origins.

    Args:
        app: The application with its checks.
        origins: Allowed origins, or "*".
        access: Decides which hosts and origins a request may name.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], access: Access) -> None:
        super().__init__(app, origins, ("GET", "POST", "DELETE"), ("*",), expose_headers=_EXPOSED)
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight request, or let the application answer and add headers."""
        applies = scope["type"] == "http" and not is_page_path(scope["path"])
        # As a POST: with CORS headers a page could also read the answer to a GET.
        if applies and self._access.wrong_host({**scope, "method": "POST"}) is None:
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)
