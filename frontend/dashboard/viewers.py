"""Who may see the dashboard, and who may use its buttons. Pure."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from eaas.net.server_records import OPERATOR_PATH

__all__ = [
    "ACTIONS_PATH",
    "FILES_PATH",
    "HEADERS",
    "SNAPSHOT_PATH",
    "OperatorToken",
    "is_foreign",
    "is_local",
    "is_page_path",
    "token_of",
]

FILES_PATH, SNAPSHOT_PATH, ACTIONS_PATH = "/page/", "/eaas/v1/snapshot", "/eaas/v1/actions"

# Scripts and style sheets come from the endpoint; no string becomes markup or a script. The page sends
# nothing to other hosts, and no site may frame it.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Security headers of every response of the dashboard."""


def is_page_path(path: str) -> bool:
    """Whether an HTTP path belongs to the dashboard, where a password may stand for the API key."""
    own = ("/", SNAPSHOT_PATH, ACTIONS_PATH)
    return path in own or path.startswith((FILES_PATH, OPERATOR_PATH))


def is_foreign(path: str, headers: Headers) -> bool:
    """Whether a page of another site caused this request. Links to the page are allowed.

    Browsers send Sec-Fetch-Site, older ones Origin. Other programs send neither.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        is_link = headers.get("sec-fetch-dest") == "document" and (
            path == "/" or path.startswith(OPERATOR_PATH)
        )
        return site not in ("same-origin", "none") and not is_link
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host", "")


def is_local(host: str | None) -> bool:
    """Whether the URL of the page has an IP address or localhost as its host.

    Anyone can register a name that resolves to this machine, and their page could press the buttons.
    """
    try:
        return host == "localhost" or bool(ipaddress.ip_address((host or "").strip("[]")))
    except ValueError:
        return False


def token_of(cluster_secret: str) -> str:
    """Derive the token from a cluster's secret. It survives restarts and does not reveal the secret."""
    return hmac.new(cluster_secret.encode(), b"operator's page", hashlib.sha256).hexdigest()


class OperatorToken:
    """The operator's token, without which a viewer sees the page without the buttons.

    `eaas up` and `eaas status` print the page's address with the token. The page turns the token into a
    cookie and redirects to its address without the token.

    Args:
        token: The token.
        port: The endpoint's port. Browsers store cookies by host, so each port needs its own cookie name.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token
        self._cookie = f"eaas-operator-{port}"

    def login(self, shown: str) -> Response:
        """Exchange the token in the page's address for a cookie. Raises HTTPException (403): it is wrong."""
        if not self._is_token(shown):
            text = "This token does not belong to the cluster. `eaas status` prints the page's address."
            raise HTTPException(403, text)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        answer.headers["cache-control"] = "no-store"
        return answer

    def is_operator(self, cookies: Mapping[str, str]) -> bool:
        """Whether a request has the operator's token in its cookie; else it gets no buttons."""
        return self._is_token(cookies.get(self._cookie, ""))

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(errors="replace"), self._token.encode())
