"""The text and the bytes of single tokens, for answers with log-probabilities."""

from __future__ import annotations

import functools
import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = ["NumberedTexts", "TokenTexts"]

_MOST_CACHED = 65_536
_BYTE = re.compile("<0x([0-9A-F]{2})>")


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
