"""Counts in sentences for people."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 server", "2 servers"; `plural` where an "s" does not make it."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
