"""Counts in sentences."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 server", "2 servers"; `plural` for irregular nouns."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
