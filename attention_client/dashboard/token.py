"""The operator's token: without it the page shows, and its buttons are missing.

`eaas up` and `eaas status` print the page's address with the token in it. The page turns it into a cookie,
which the browser shows from then on, and the address bar keeps the address without it.
"""

from __future__ import annotations

import hashlib
import hmac
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import Scope

from eaas.server_records import OPERATOR_PATH

__all__ = ["OperatorToken", "token_of"]


def token_of(cluster_secret: str) -> str:
    """The token of a cluster with a secret: it outlives a restart, and the secret cannot be told from it."""
    return hmac.new(cluster_secret.encode(), b"operator's page", hashlib.sha256).hexdigest()


class OperatorToken:
    """Who may press the page's buttons.

    Args:
        token: What an operator shows.
        port: The endpoint's. Browsers keep cookies by host: clusters at several ports need several names.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token
        self._cookie = f"eaas-operator-{port}"

    def login(self, scope: Scope) -> Response | None:
        """The answer to the page's address with a token in it; None for every other request."""
        if not scope["path"].startswith(OPERATOR_PATH):
            return None
        if not self._is_token(scope["path"].removeprefix(OPERATOR_PATH).rstrip("/")):
            return PlainTextResponse(
                "This token is not the cluster's: `eaas status` prints the page's address.\n",
                status_code=403,
            )
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        answer.headers["cache-control"] = "no-store"
        return answer

    def is_operator(self, headers: Headers) -> bool:
        """Whether a request shows the token."""
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(errors="replace"), self._token.encode())
