"""Log-probabilities in OpenAI's two forms, of chat and of completions, and the texts of single tokens."""

from __future__ import annotations

import codecs
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from eaas.generation.scores import Scores

__all__ = [
    "CompletionLogprobs",
    "LogprobsForm",
    "NumberedTexts",
    "Scored",
    "TokenTexts",
    "chat_logprobs",
]

_LEAST = -9999.0  # JSON has no -inf
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


@dataclass(frozen=True)
class Scored:
    """Tokens of an answer with their scores; the piece of the answer that goes before their text."""

    tokens: list[int]
    scores: Scores

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        """Concatenate consecutive parts, at least one."""
        tokens = [token for part in parts for token in part.tokens]
        return cls(tokens, Scores.joined([part.scores for part in parts]))


LogprobsForm = Callable[[Scored], dict[str, Any]]
"""Converts one choice's scored tokens, in order, to the choice's `logprobs`."""


def chat_logprobs(texts: TokenTexts, scored: Scored) -> dict[str, Any]:
    """Return the `logprobs` of /v1/chat/completions: a record of each token."""

    def record(token: int, logprob: float) -> dict[str, Any]:
        value, data = max(logprob, _LEAST), list(texts.data(token))
        return {"token": texts.text(token), "logprob": value, "bytes": data}

    content = [
        record(token, logprob) | {"top_logprobs": [record(*likely) for likely in likeliest]}
        for token, logprob, likeliest in _rows(scored)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The form of /v1/completions: lists over the tokens. It counts the text before each token.

    Args:
        texts: The tokens' texts.
        skips_special: Whether the choice's text has no special tokens.
    """

    def __init__(self, texts: TokenTexts, *, skips_special: bool) -> None:
        self._texts = texts
        self._skips_special = skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def __call__(self, scored: Scored) -> dict[str, Any]:
        """Return the `logprobs` of the next tokens; null for a token that nothing precedes."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        found: dict[str, list[Any]] = {name: [] for name in names}
        for token, logprob, likeliest in _rows(scored):
            found["tokens"].append(self._texts.text(token))
            found["text_offset"].append(self._offset)
            if not (self._skips_special and self._texts.is_special(token)):
                self._offset += len(self._decoder.decode(self._texts.data(token)))
            if math.isnan(logprob):
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            found["token_logprobs"].append(max(logprob, _LEAST))
            # Of tokens with the same text, the likeliest counts.
            top: dict[str, float] = {}
            for likely, value in (*likeliest, (token, logprob)):
                top.setdefault(self._texts.text(likely), max(value, _LEAST))
            found["top_logprobs"].append(top)
        return found


def _rows(scored: Scored) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Iterate over tokens, their log-probabilities, and the likeliest tokens with theirs."""
    scores = scored.scores
    pairs = map(zip, scores.top_TK.tolist(), scores.top_logprob_TK.tolist())
    return zip(scored.tokens, scores.logprob_T.tolist(), map(list, pairs), strict=True)
