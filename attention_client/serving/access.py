"""Access checks of every HTTP request, before any application: Host and Origin headers, API keys, CORS.

On loopback, Host and Origin defend against web pages in local browsers. A page can send requests to the
browser's own machine. With DNS rebinding (the page's name resolves to 127.0.0.1 after the page has loaded) it
can also read the answers; then the Host header holds the page's name. Without rebinding the Origin header
holds it.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from attention_client.serving.dashboard.viewers import is_page_path
from attention_client.serving.errors import error_response
from eaas.generation.errors import ApiError
from eaas.net.api_keys import ApiKeys

__all__ = ["Access", "Cors"]

# Health checks and Prometheus send no key.
_OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/metrics"})
# The second is of Anthropic's clients, some of which send both.
_SHOWN = (b"authorization", b"x-api-key")

# The same answer for a wrong key and for no key.
_UNKNOWN = ApiError(
    401,
    "No valid API key: show one of this endpoint's as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
    code="invalid_api_key",
)
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:/@\[\]\s]+)(:[0-9]*)?")
# These methods change nothing, and a page cannot read the answers without CORS headers.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Headers of answers that a web page of another origin may read.
_EXPOSED = ("X-Request-Id", "X-Eaas-Ignored-Fields", "Retry-After")


class Access:
    """Decides which requests may pass.

    Args:
        keys: API keys, one of which each request must present, except for health and metrics; None: no key.
        hosts: Host names, without a port, beside those of loopback, that requests may use; None: any.
    """

    def __init__(self, keys: ApiKeys | None = None, hosts: Collection[str] | None = None) -> None:
        self._keys = keys
        self._hosts = None if hosts is None else {_plain(name) for name in hosts}

    def refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that must not pass, or to a WebSocket (as a GET); None: it may."""
        path, wrong_host = scope["path"], self.wrong_host(scope)
        if wrong_host is not None:
            return error_response(wrong_host, path)
        if self._is_authorised(scope):
            return None
        if not is_page_path(path):
            return error_response(_UNKNOWN, path)
        return PlainTextResponse(
            "The password is one of this endpoint's API keys; any user name will do.\n",
            status_code=401,
            headers={"WWW-Authenticate": 'Basic realm="Expert-as-a-Service", charset="UTF-8"'},
        )

    def wrong_host(self, scope: Scope) -> ApiError | None:
        """Return the refusal of an HTTP request that names another host; None: the request may pass."""
        if self._hosts is None:
            return None
        headers = Headers(scope=scope)
        for host in headers.getlist("host"):
            found = _HOST_PORT.fullmatch(host)
            # HTTP/1.0 clients may send no Host; browsers always do.
            if host and (found is None or not self._knows(found[1])):
                return _refusal("Host", host)
        origins = [] if scope["method"] in _SAFE_METHODS else headers.getlist("origin")
        wrong = next((origin for origin in origins if not self._knows_origin(origin)), None)
        return None if wrong is None else _refusal("Origin", wrong)

    def _knows(self, host: str) -> bool:
        host = _plain(host)
        if host == "localhost" or host.endswith(".localhost") or host in (self._hosts or ()):
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def _knows_origin(self, origin: str) -> bool:
        try:
            parts = urlsplit(origin)
            host = parts.hostname
        except ValueError:
            return False
        if parts.scheme in ("http", "https"):
            return host is not None and self._knows(host)
        # Extensions and desktop applications use their own schemes; pages use http, https or "null".
        return bool(parts.scheme)

    def _is_authorised(self, scope: Scope) -> bool:
        if self._keys is None or scope["path"] in _OPEN_PATHS:
            return True
        headers, keys = (
            [value for key, value in scope["headers"] if key == name] for name in _SHOWN
        )
        from_page = Headers(scope=scope).get("sec-fetch-site") == "same-origin"
        if is_page_path(scope["path"]) or from_page:
            # Only the page and its own requests may show a password, because a browser sends a stored one
            # automatically, even if another page triggers the request.
            headers = [_as_bearer(header) for header in headers]
        if len(headers) > 1 or len(keys) > 1:
            return False
        return any(map(self._keys.allow, [*headers, *(b"Bearer " + key for key in keys)]))


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


def _as_bearer(header: bytes) -> bytes:
    """Turn a browser's password (HTTP Basic, RFC 7617) into a bearer token, so that one check serves both.

    A header of another kind is unchanged; a malformed password gives an empty one.
    """
    kind, _, credentials = header.partition(b" ")
    if kind.lower() != b"basic":
        return header
    try:
        _, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except binascii.Error:
        return b""
    return b"Bearer " + password


def _plain(host: str) -> str:
    return host.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _refusal(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"The {header} header names {value[:100]!r}, but this endpoint serves only its own machine. Use "
        "http://localhost, or add the name to attention_client.allowed_hosts.",
        code="host_not_allowed",
    )
