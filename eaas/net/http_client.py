"""HTTP clients of commands and roles: proxies and certificates of the environment.

A proxy cannot reach this machine's loopback, and http:// needs no certificates.
"""

from __future__ import annotations

import os
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from eaas.errors import ConfigError
from eaas.net.loopback import is_loopback

__all__ = ["failure", "http_settings"]

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def http_settings(url: str) -> dict[str, Any]:
    """Choose proxy and certificates for an httpx client that calls a URL: keywords of its constructor.

    Raises:
        ConfigError: The proxy or the certificates that the environment names cannot be used.
    """
    import httpx

    name, proxy = _proxy(url)
    # Of itself httpx would refuse every host because of a proxy that it cannot use.
    settings: dict[str, Any] = {"trust_env": False, "proxy": proxy}
    try:
        if urlsplit(url).scheme == "https":
            settings["verify"] = httpx.create_ssl_context()
    except OSError as error:
        what = next(
            (f"{n}={os.environ[n]}" for n in _CERTIFICATES if os.environ.get(n)), "certificates"
        )
        raise ConfigError(f"{what}: {error.strerror or error}: correct or unset it") from error
    try:
        if proxy is not None:
            httpx.HTTPTransport(proxy=proxy, verify=False).close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        # The proxy's URL may hold a password.
        raise ConfigError(
            f"{name}: this proxy cannot be used ({error}): name an http:// proxy, or the host in no_proxy"
        ) from error
    return settings


def failure(url: str, error: Exception) -> str:
    """Describe in one line, without the URL, why a call of it failed."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        why = f"{error.response.status_code} {error.response.reason_phrase}"
    else:
        why = str(error).partition("\n")[0] or type(error).__name__
    name, proxy = _proxy(url)
    return f"{why}, through the proxy of {name}" if proxy else why


def _proxy(url: str) -> tuple[str, str | None]:
    """Environment variable with the proxy for a URL, and the proxy's URL; None without one."""
    try:
        parts = urlsplit(url)
    except ValueError:  # reported by the call
        return "", None
    if not is_loopback(url) and not urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        proxies = urllib.request.getproxies()
        for name in (parts.scheme, "all"):
            if proxy := proxies.get(name):
                return f"{name}_proxy", proxy if "://" in proxy else f"http://{proxy}"
    return "", None
