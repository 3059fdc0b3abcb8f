"""Counts with nouns, for messages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """Write a number with its noun: "1 server", "2 servers"."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"
