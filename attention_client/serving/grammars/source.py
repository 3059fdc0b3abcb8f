"""A grammar as text: parts of several kinds, of which the first refers to the others as `@NAME`.

This module imports nothing slow: the prompt worker and the grammar check import it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class Source:
    """A whole grammar, before it is checked.

    Attributes:
        parts: The parts; the answer follows the first.
    """

    parts: tuple[Part, ...]

    def dump(self) -> str:
        """Return the grammar as JSON, the message to the process that checks it."""
        return json.dumps([asdict(part) for part in self.parts])

    @classmethod
    def load(cls, text: str) -> Source:
        """Return the grammar that `dump` wrote."""
        fields: list[dict[str, Any]] = json.loads(text)
        return cls(tuple(Part(**each) for each in fields))
