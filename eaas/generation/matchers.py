"""Grammars that are compiled for a model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["Matchers", "matcher_of"]

_MOST_STATES = 50_000  # 1 to 2 kB each
_MOST_SYMBOLS = 100_000
_KEPT = 64


def matcher_of(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar; one step of it takes at most some 15 ms. Raises ValueError with the reason."""
    limits = LLParserLimits(
        max_lexer_states=_MOST_STATES, max_grammar_size=_MOST_SYMBOLS, verbose_errors=False
    )
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


class Matchers:
    """Compiles grammars for a model's tokenizer, and keeps the recent ones. Thread-safe.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary: Size of the model's vocabulary.
        end_tokens: The tokens that end an answer.
        threads: Read the tokenizer, which holds the interpreter's lock for up to a second.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int], threads: Executor
    ) -> None:
        self.vocabulary = max(vocabulary, len(tokenizer))

        def read() -> LLTokenizer:
            from llguidance.hf import from_tokenizer  # it imports transformers

            return from_tokenizer(tokenizer, n_vocab=self.vocabulary, eos_token=list(end_tokens))

        self._tokens = threads.submit(read)
        self._matcher = lru_cache(_KEPT)(lambda text: matcher_of(self._tokens.result(), text))

    def refusal(self) -> str:
        """Return why the tokenizer takes no grammars; empty: it does. Blocks until it is read."""
        error = self._tokens.exception()
        return "" if error is None else str(error)

    def of(self, text: str) -> LLMatcher:
        """Compile a grammar that was checked before; return a matcher before the first token.

        Raises:
            ValueError: It cannot be compiled.
        """
        return self._matcher(text)
