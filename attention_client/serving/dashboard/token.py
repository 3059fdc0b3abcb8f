"""The operator's token: a viewer without it sees the page without the buttons.

`eaas up` and `eaas status` print the page's address with the token. The page turns the token into a cookie
and redirects to its address without the token.
"""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import Scope

from eaas.net.server_records import OPERATOR_PATH

__all__ = ["OperatorToken", "token_of"]


def token_of(cluster_secret: str) -> str:
    """Derive the token from a cluster's secret. It survives restarts and does not reveal the secret."""
    return hmac.new(cluster_secret.encode(), b"operator's page", hashlib.sha256).hexdigest()


class OperatorToken:
    """Checks which viewers may use the dashboard's buttons.

    Args:
        token: The operator's token.
        port: The endpoint's port. Browsers store cookies by host, so each port needs its own cookie name.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token
        self._cookie = f"eaas-operator-{port}"

    def login(self, scope: Scope) -> Response | None:
        """Exchange the token in the page's address for a cookie; None: the request is another one."""
        if not scope["path"].startswith(OPERATOR_PATH):
            return None
        if not self._is_token(scope["path"].removeprefix(OPERATOR_PATH).rstrip("/")):
            return PlainTextResponse(
                "This token does not belong to the cluster. `eaas status` prints the page's address.\n",
                status_code=403,
            )
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        answer.headers["cache-control"] = "no-store"
        return answer

    def is_operator(self, headers: Headers) -> bool:
        """Whether a request for the page has the operator's token in its cookie; else it gets no buttons."""
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(errors="replace"), self._token.encode())
