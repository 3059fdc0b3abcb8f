"""Grammars that answers must follow: JSON schemas, regular expressions, choices, tool calls.

- `check`: compiles a grammar in a process of its own, which may crash or hang on a hostile one.
- `compiler`: compiles checked grammars for the model's tokenizer, outside the event loop; keeps recent ones.

A grammar as text has parts of several kinds, of which the first refers to the others as `@NAME`. This module
imports nothing slow: the prompt worker and the grammar check import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Part", "Source"]


@dataclass(frozen=True)
class Part:
    """One part of a grammar.

    Attributes:
        name: Name that the first part refers to.
        kind: "json": a JSON schema; "regex": a regular expression in Rust's syntax; "lark": llguidance's
            variant of Lark; "grammar": Lark, or GBNF (llama.cpp's).
        text: The part itself.
    """

    name: str
    kind: Literal["json", "regex", "lark", "grammar"]
    text: str


Source = tuple[Part, ...]
"""A whole grammar, before it is checked; the answer follows the first part."""
