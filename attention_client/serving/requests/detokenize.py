"""Incremental detokenizer: turns the engine's tokens into the text of an answer, on the HTTP event loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Detokenizer"]


class Detokenizer:
    """Converts tokens to text, and returns text as soon as later tokens cannot change it.

    Each call decodes a short window. A token whose bytes end inside a character (decoded as U+FFFD) waits
    for the next one. All pieces together equal ``tokenizer.decode`` of all tokens.

    Args:
        tokenizer: A transformers tokenizer.
        skip_special_tokens: Whether the text has no special tokens.
        shown: The text of some tokens, in place of the tokenizer's.
    """

    def __init__(
        self, tokenizer: Any, *, skip_special_tokens: bool, shown: Mapping[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._text_of = shown or {}
        self._tokens: list[int] = []
        self._window = 0  # first token of the window
        self._shown = 0  # number of tokens whose text was returned

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))

    def push(self, token: int) -> str:
        """Add a token of the answer; return the text that it completes, empty until later tokens fix it."""
        if token in self._text_of:
            return self.flush() + self._text_of[token]
        self._tokens.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """Return the text still held back, an incomplete character, after the last token of the answer."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._window : self._shown])
        text = self._decode(self._tokens[self._window :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._window, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]
