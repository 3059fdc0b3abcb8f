"""A compiled grammar, which an answer may have to follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Grammar"]


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, which any number of sequences may follow.

    Attributes:
        text: The grammar, for llguidance's `LLMatcher`.
        start: llguidance's matcher before the first token; copied for each sequence.
        end_tokens: The tokens that end an answer.
        field: The field of the request that asks for the grammar, for errors.
    """

    text: str
    start: LLMatcher
    end_tokens: tuple[int, ...]
    field: str
