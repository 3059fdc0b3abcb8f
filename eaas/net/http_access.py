"""Access checks of HTTP requests, before any application: Host and Origin headers, and API keys.

On loopback, Host and Origin defend against web pages in local browsers. A page can send requests to the
browser's own machine. With DNS rebinding (the page's name resolves to 127.0.0.1 after the page has loaded) it
can also read the answers; then the Host header holds the page's name. Without rebinding the Origin header
holds it.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from eaas.generation.errors import ApiError
from eaas.net.api_keys import ApiKeys
from eaas.net.listen_policy import only_here

__all__ = ["HttpAccess", "known_hosts"]

# Health checks and Prometheus send no key.
_OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/metrics"})
# The same answer for a wrong key and for no key.
_UNKNOWN = ApiError(
    401,
    "No valid API key: show one of this endpoint's as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
    code="invalid_api_key",
)
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:/@\[\]\s]+)(:[0-9]*)?")
# These methods change nothing, and a page cannot read the answers without CORS headers.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def known_hosts(host: str, further: Collection[str]) -> tuple[str, ...] | None:
    """Return the names that requests to a server may use; None (any) beyond loopback, where they are unknown.

    Args:
        host: Address that the server listens on.
        further: Further names while that is loopback.
    """
    return (host, *further) if only_here(host) else None


class HttpAccess:
    """Decides which requests may pass, by their ASGI scope.

    Args:
        keys: API keys, one of which each request must present, except for health and metrics; None: no key.
        hosts: Host names, without a port, beside those of loopback, that requests may use; None: any.
    """

    def __init__(self, keys: ApiKeys | None = None, hosts: Collection[str] | None = None) -> None:
        self._keys = keys
        self._hosts = None if hosts is None else {_plain(name) for name in hosts}

    def error(self, scope: Mapping[str, Any], *, takes_password: bool = False) -> ApiError | None:
        """Return why a request, or a WebSocket (as a GET), must not pass; None: it may.

        Args:
            scope: The request.
            takes_password: A browser's password may stand for the API key.
        """
        wrong = self.wrong_host(scope)
        if wrong is not None or self._is_authorised(scope, takes_password):
            return wrong
        return _UNKNOWN

    def wrong_host(self, scope: Mapping[str, Any]) -> ApiError | None:
        """Return the refusal of an HTTP request that names another host; None: the request may pass."""
        if self._hosts is None:
            return None
        for host in _values(scope, b"host"):
            found = _HOST_PORT.fullmatch(host)
            # HTTP/1.0 clients may send no Host; browsers always do.
            if host and (found is None or not self._knows(found[1])):
                return _refusal("Host", host)
        origins = [] if scope["method"] in _SAFE_METHODS else _values(scope, b"origin")
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

    def _is_authorised(self, scope: Mapping[str, Any], takes_password: bool) -> bool:
        if self._keys is None or scope["path"] in _OPEN_PATHS:
            return True
        shown = _values(scope, b"authorization")
        # Anthropic's clients send this one, and some of them both.
        keys = _values(scope, b"x-api-key")
        if takes_password or _values(scope, b"sec-fetch-site") == ["same-origin"]:
            # Only the page and its own requests may show a password, because a browser sends a stored one
            # automatically, even if another page triggers the request.
            shown = [_as_bearer(header) for header in shown]
        if len(shown) > 1 or len(keys) > 1:
            return False
        headers = [*shown, *(f"Bearer {key}" for key in keys)]
        return any(self._keys.allow(header.encode("latin-1")) for header in headers)


def _values(scope: Mapping[str, Any], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _as_bearer(header: str) -> str:
    """Turn a browser's password (HTTP Basic, RFC 7617) into a bearer token, so that one check serves both.

    A header of another kind is unchanged; a malformed password gives an empty one.
    """
    kind, _, credentials = header.partition(" ")
    if kind.lower() != "basic":
        return header
    try:
        _, _, password = base64.b64decode(credentials.strip(), validate=True).partition(b":")
    except ValueError:
        return ""
    return f"Bearer {password.decode('latin-1')}"


def _plain(host: str) -> str:
    return host.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _refusal(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"The {header} header names {value[:100]!r}, but this endpoint serves only its own machine. Use "
        "http://localhost, or add the name to frontend.allowed_hosts.",
        code="host_not_allowed",
    )
