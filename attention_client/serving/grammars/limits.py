"""Limits of llguidance on the time and the memory of one grammar."""

from __future__ import annotations

from llguidance import LLParserLimits

__all__ = ["parser_limits"]

_MOST_STATES = 50_000  # 1 to 2 kB each
_MOST_SYMBOLS = 100_000


def parser_limits() -> LLParserLimits:
    """Return the limits. One step of a grammar takes at most some 15 ms, and an error names no schema."""
    return LLParserLimits(
        max_lexer_states=_MOST_STATES, max_grammar_size=_MOST_SYMBOLS, verbose_errors=False
    )
