"""Host and Origin checks of an endpoint on loopback: a defence against web pages in local browsers.

A web page can send requests to the browser's own machine. With DNS rebinding (the page's name resolves to
127.0.0.1 after the page has loaded) it can also read the answers; then the Host header holds the page's name.
Without rebinding the Origin header holds it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import Scope

from attention_client.serving.api_error import ApiError

__all__ = ["LoopbackHosts"]

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:/@\[\]\s]+)(:[0-9]*)?")
# These methods change nothing, and a page cannot read the answers without CORS headers.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class LoopbackHosts:
    """Checks requests for allowed hosts: localhost, loopback addresses and the configured names.

    Args:
        allowed: The configured names, without a port.
    """

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = {_plain(name) for name in allowed}

    def check(self, scope: Scope) -> ApiError | None:
        """Return the refusal of a request that names another host; None: the request may pass.

        Args:
            scope: The ASGI scope of an HTTP request.
        """
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
                found = _HOST_PORT.fullmatch(host)
                # HTTP/1.0 clients may send no Host; browsers always do.
                if host and (found is None or not self._knows(found[1])):
                    return _refusal("Host", host)
            elif name == b"origin" and scope["method"] not in _SAFE_METHODS:
                origin = value.decode("latin-1")
                if not self._knows_origin(origin):
                    return _refusal("Origin", origin)
        return None

    def _knows(self, host: str) -> bool:
        host = _plain(host)
        if host == "localhost" or host.endswith(".localhost") or host in self._allowed:
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


def _plain(host: str) -> str:
    return host.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _refusal(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"The {header} header names {value[:100]!r}, but this endpoint serves only its own machine. Use "
        "http://localhost, or add the name to attention_client.allowed_hosts.",
        code="host_not_allowed",
    )
