"""What a browser may do with the page, and whose requests the page takes. Pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers

__all__ = ["headers", "is_foreign", "with_nonce"]

_SOCKET = "/_nicegui_ws/"
_INLINE = re.compile(rb"<(script|style)\b")


def headers(nonce: str) -> dict[str, str]:
    """Of each of the page's responses.

    Scripts and style sheets are the endpoint's own, or carry the nonce of this response: one that came in
    with somebody's text does not run. Strings are never compiled to scripts, so a property that NiceGUI
    would evaluate (":name") does nothing either. Nothing goes anywhere else, and nobody may frame the page.
    Style attributes are free: NiceGUI's template has one, and they run nothing.

    Args:
        nonce: Of this response alone, not to be guessed.
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
    """A page of NiceGUI's whose scripts and style sheets carry the nonce.

    They are those of its template alone: it writes every "<" of the elements' data as "&lt;".
    """
    return _INLINE.sub(rb'<\1 nonce="' + nonce.encode() + b'"', html)


def is_foreign(path: str, headers: Headers) -> bool:
    """Whether a page of another site has the browser send this request; links to the page are welcome.

    Browsers tell (Sec-Fetch-Site); one that does not names the page's origin. A program that is no browser
    says neither.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        is_link = headers.get("sec-fetch-dest") == "document" and not path.startswith(_SOCKET)
        return site not in ("same-origin", "none") and not is_link
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host", "")
