"""What requests to an endpoint on loopback may name as their host: a defence against pages in local browsers.

A web page can send requests to the browser's own machine. By DNS rebinding (its name leads to 127.0.0.1 once
it is loaded) it can even read the answers; its requests then have its name in Host. Without rebinding its
name is in Origin.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import Scope

from attention_client.serve.errors import ApiError

__all__ = ["LoopbackHosts"]

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:/@\[\]\s]+)(:[0-9]*)?")
# Requests by these change nothing, and without CORS headers a page cannot read the answers.
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class LoopbackHosts:
    """The hosts that requests may name: localhost, loopback addresses and the names that were configured.

    Args:
        allowed: Other names, without a port.
    """

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = {_plain(name) for name in allowed}

    def check(self, scope: Scope) -> ApiError | None:
        """The refusal of a request that names another host; None where it may pass.

        Args:
            scope: ASGI's, of an HTTP request.
        """
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
                found = _HOST_PORT.fullmatch(host)
                # HTTP/1.0 needs no Host; browsers send one.
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
        # Extensions and desktop applications have schemes of their own; pages have not, or say "null".
        return bool(parts.scheme)


def _plain(host: str) -> str:
    return host.removeprefix("[").removesuffix("]").removesuffix(".").lower()


def _refusal(header: str, value: str) -> ApiError:
    return ApiError(
        403,
        f"The {header} header names {value[:100]!r}, and this endpoint serves its own machine only. Use "
        "http://localhost, or add the name to attention_client.allowed_hosts.",
        code="host_not_allowed",
    )
