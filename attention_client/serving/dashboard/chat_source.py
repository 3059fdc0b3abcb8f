"""What the dashboard's chat box asks: the engine behind the endpoint."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

__all__ = ["ChatSource", "Piece"]

Piece = str | Mapping[str, int]
"""Text of an answer, or the number of (token, expert) pairs by server of the text that follows."""


class ChatSource(Protocol):
    """Answers the messages of the chat box."""

    def answer(self, text: str, tokens: int) -> AsyncGenerator[Piece, None]:
        """Generate the pieces of an answer. An engine that cannot name the servers yields text only.

        Args:
            text: The viewer's message.
            tokens: Maximum number of tokens.

        Raises:
            ApiError: The answer failed, or the endpoint is at its limit of requests.
        """
