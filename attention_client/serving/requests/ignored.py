"""The header that tells clients which unknown fields of a request's body were ignored."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

__all__ = ["ignored_header"]

_CHARACTERS = 40  # of each name


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header of an answer that names the ignored fields, percent-encoded and truncated."""
    # Names come from the client: percent-encoded, they hold neither line ends nor commas. An empty one is
    # quoted, because a header must not end with a space.
    named = ", ".join(quote(name[:_CHARACTERS], safe="") or '""' for name in names)
    return {"X-Eaas-Ignored-Fields": named} if names else {}
