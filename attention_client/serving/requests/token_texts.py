"""The text of an answer's tokens as they arrive, and of single tokens, for log-probabilities."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["Detokenizer", "NumberedTexts", "TokenTexts"]

_MOST_CACHED = 65_536
_BYTE = re.compile("<0x([0-9A-F]{2})>")


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


class TokenTexts:
    """Looks up the bytes of tokens. The bytes of an answer's tokens together are those of its text.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = dict(tokenizer.added_tokens_decoder)
        self._byte_of: dict[str, int] = {}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        if decoder is not None and b'"ByteLevel"' in decoder.__getstate__():
            self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self.data = functools.lru_cache(_MOST_CACHED)(self._data)

    def text(self, token: int) -> str:
        """Return a token's text, with U+FFFD for an incomplete character."""
        return self.data(token).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        """Whether the tokenizer leaves the token out of the text, if it skips special tokens."""
        added = self._added.get(token)
        return added is not None and bool(added.special)

    def _data(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""  # no text: the vocabulary of the model is larger than that of the tokenizer
        if self._byte_of:
            # As the decoder does, also for an added token.
            known = all(character in self._byte_of for character in name)
            return bytes(map(self._byte_of.__getitem__, name)) if known else name.encode()
        if token in self._added:
            return name.encode()
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        # A decoder may drop the space before the first token only, so the second one shows the whole text.
        alone, twice = (str(self._tokenizer.decode([token] * times)) for times in (1, 2))
        return twice[len(alone) :].encode()


class NumberedTexts(TokenTexts):
    """vLLM's texts by number, which tell all tokens apart, with the tokens' own bytes."""

    def text(self, token: int) -> str:
        """Return `token_id:N`."""
        return f"token_id:{token}"
