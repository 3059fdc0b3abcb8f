"""Whether a URL names this machine's loopback, where no proxy of the environment can be of use."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

__all__ = ["is_loopback"]


def is_loopback(url: str) -> bool:
    """Whether a URL's host is "localhost" or a loopback address; other names are not resolved."""
    try:
        host = urlsplit(url).hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            return True
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A connection to the unspecified address (0.0.0.0) goes to this machine.
    return address.is_loopback or address.is_unspecified
