"""The Content-Security-Policy of the dashboard, and the check for requests of other sites. Pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers

__all__ = ["headers", "is_foreign", "with_nonce"]

_SOCKET = "/_nicegui_ws/"
_INLINE = re.compile(rb"<(script|style)\b")


def headers(nonce: str) -> dict[str, str]:
    """Return the security headers of a response of the page.

    Scripts and style sheets must come from the endpoint or carry the nonce, so injected ones do not run.
    Strings are not compiled to scripts, so a property that NiceGUI would evaluate (":name") has no effect.
    The page sends nothing to other hosts, and no site may frame it. Style attributes are allowed: NiceGUI's
    template needs one, and they run no code.

    Args:
        nonce: Random, for this response only.
    """
    policy = (
        "default-src 'none'; "
        f"script-src 'self' 'nonce-{nonce}'; "
        f"style-src-elem 'self' 'nonce-{nonce}'; style-src-attr 'unsafe-inline'; "
        "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }


def with_nonce(html: bytes, nonce: str) -> bytes:
    """Add the nonce to the scripts and style sheets of a NiceGUI page.

    Only NiceGUI's template has such tags: it writes every "<" of the elements' data as "&lt;".
    """
    return _INLINE.sub(rb'<\1 nonce="' + nonce.encode() + b'"', html)


def is_foreign(path: str, headers: Headers) -> bool:
    """Whether a page of another site caused this request. Links to the dashboard are allowed.

    Browsers send Sec-Fetch-Site, older ones Origin. Other programs send neither.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        is_link = headers.get("sec-fetch-dest") == "document" and not path.startswith(_SOCKET)
        return site not in ("same-origin", "none") and not is_link
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host", "")
