"""Token ids to text, one by one."""

from __future__ import annotations

from typing import Any

__all__ = ["Detokenizer"]


class Detokenizer:
    """Gives out the text of tokens as soon as it cannot change any more.

    Only a short window is decoded each time. A token whose bytes end inside a character (decoded as
    U+FFFD) waits for the next one. The pieces together are what ``tokenizer.decode`` gives at once.

    Args:
        tokenizer: A transformers tokenizer.
        skip_special_tokens: Leave special tokens out.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens: list[int] = []
        self._window = 0  # tokens before it are never looked at again
        self._shown = 0  # tokens before it have been given out

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))

    def push(self, token: int) -> str:
        """The text that this token completes; often more or less than its own."""
        self._tokens.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """The text of an unfinished character at the end."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._window : self._shown])
        text = self._decode(self._tokens[self._window :])
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return ""
        self._window, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]
