"""Counts in sentences."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """A number with its noun: "1 server", "2 servers"."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"
