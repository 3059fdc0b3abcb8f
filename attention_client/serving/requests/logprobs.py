"""Log-probabilities in OpenAI's two forms: that of chat, and the older one of completions."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attention_client.serving.requests.token_texts import TokenTexts
from eaas.generation.scores import Scores

__all__ = ["CompletionLogprobs", "LogprobsForm", "Scored", "chat_logprobs"]

_LEAST = -9999.0  # JSON has no -inf


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
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, logprob, likeliest in _rows(scored):
            tokens.append(self._texts.text(token))
            offsets.append(self._offset)
            if not (self._skips_special and self._texts.is_special(token)):
                self._offset += len(self._decoder.decode(self._texts.data(token)))
            if math.isnan(logprob):
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(max(logprob, _LEAST))
            # Of tokens with the same text, the likeliest counts.
            top: dict[str, float] = {}
            for likely, value in (*likeliest, (token, logprob)):
                top.setdefault(self._texts.text(likely), max(value, _LEAST))
            tops.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _rows(scored: Scored) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Iterate over tokens, their log-probabilities, and the likeliest tokens with theirs."""
    scores = scored.scores
    pairs = map(zip, scores.top_TK.tolist(), scores.top_logprob_TK.tolist())
    return zip(scored.tokens, scores.logprob_T.tolist(), map(list, pairs), strict=True)
