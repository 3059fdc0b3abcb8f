"""What the dashboard's chat box asks: the engine behind the endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping

__all__ = ["ChatSource", "Piece"]

Piece = str | Mapping[str, int]
"""Text of an answer, or the number of (token, expert) pairs by server of the text that follows."""

ChatSource = Callable[[str, int], AsyncGenerator[Piece, None]]
"""Generates the pieces of the answer to a viewer's message, with so many tokens at most.

An engine that cannot name the servers yields text only. Raises ApiError: the answer failed, or the endpoint
is at its limit of requests.
"""
