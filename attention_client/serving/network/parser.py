"""h11's parser of a server's connections, with the rules of HTTP/1.1 that it leaves to its user."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import h11

__all__ = ["Parser"]

_MOST_HEAD_BYTES = 16 * 2**10  # request line and headers


class Parser(h11.Connection):
    """Refuses large heads and ambiguous lengths; knows whether an answer is a stream of events.

    Attributes:
        is_event_stream: Whether the last answer that began is a stream of server-sent events.
        is_quiet: Set by its user; False after anything was sent.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MOST_HEAD_BYTES)
        self.is_event_stream = False
        self.is_quiet = True

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError for a head that is refused."""
        event = super().next_event()
        if type(event) is not h11.Request:
            return event
        self._check(event)
        return event if event.target.startswith(b"/") else _in_origin_form(event)

    def send(self, event: Any) -> Any:
        """Encode an event of the answer."""
        self.is_quiet = False
        if type(event) is h11.Response:
            kinds = (value for name, value in event.headers if name == b"content-type")
            self.is_event_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        return super().send(event)

    def _check(self, head: h11.Request) -> None:
        # h11 itself checks only heads that arrive in several parts.
        fields = sum(len(name) + len(value) + 4 for name, value in head.headers)
        if len(head.target) + fields > _MOST_HEAD_BYTES:
            raise h11.RemoteProtocolError("The head is too large.", error_status_hint=431)
        if not head.http_version.startswith(b"1."):
            raise h11.RemoteProtocolError("HTTP/1.1 is spoken here.", error_status_hint=505)
        names = {name for name, _ in head.headers}
        # A proxy may have read another length (RFC 9112, 6.1).
        if b"transfer-encoding" in names and (
            b"content-length" in names or head.http_version < b"1.1"
        ):
            raise h11.RemoteProtocolError(
                "Transfer-Encoding beside Content-Length or in HTTP/1.0.", error_status_hint=400
            )


def _in_origin_form(head: h11.Request) -> h11.Request:
    """Return a head whose target is a URL, as proxies get it, with path and Host (RFC 9112, 3.2.2)."""
    try:
        url = urlsplit(head.target.decode("ascii"))
    except ValueError as error:
        raise h11.RemoteProtocolError(str(error)) from error
    if url.scheme.lower() not in ("http", "https"):
        return head
    headers = [(name, value) for name, value in head.headers if name != b"host"]
    return h11.Request(
        method=head.method,
        target=(url.path or "/") + (f"?{url.query}" if url.query else ""),
        headers=[(b"host", url.netloc.encode()), *headers],
        http_version=head.http_version,
    )
