"""Tells clients and the log which unknown fields of a request's body were ignored."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from urllib.parse import quote

__all__ = ["ignored_header", "log_ignored"]

_LOG = logging.getLogger(__name__)
_CHARACTERS = 40  # of each name
_INTERVAL_S = 10.0

_logged_at = float("-inf")


def _named(names: Sequence[str]) -> str:
    # Names come from the client: percent-encoded, they hold neither line ends nor commas. An empty one is
    # quoted, because a header must not end with a space.
    return ", ".join(quote(name[:_CHARACTERS], safe="") or '""' for name in names)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header of an answer that names the ignored fields, percent-encoded and truncated."""
    return {"X-Eaas-Ignored-Fields": _named(names)} if names else {}


def log_ignored(names: Sequence[str]) -> None:
    """Log the names of ignored fields, at most once in 10 s."""
    global _logged_at
    if not names:
        return
    now = time.monotonic()
    if now - _logged_at >= _INTERVAL_S:
        _logged_at = now
        _LOG.warning("unknown fields of a request were ignored: %s", _named(names))
