"""CORS: which web pages of other origins may use the HTTP endpoint from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_client.serving.access import Access
from attention_client.serving.dashboard.mount import is_page_path

__all__ = ["Cors"]

_EXPOSED = ("X-Request-Id", "X-Eaas-Ignored-Fields", "Retry-After")


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
        answer = super().__call__ if self._applies(scope) else self.app
        await answer(scope, receive, send)

    def _applies(self, scope: Scope) -> bool:
        if scope["type"] != "http" or is_page_path(scope["path"]):
            return False
        # As a POST: with CORS headers a page could also read the answer to a GET.
        return self._access.wrong_host({**scope, "method": "POST"}) is None
