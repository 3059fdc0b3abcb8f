"""The form that an answer must have, as a grammar, and how such an answer is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as data_field
from typing import Any

from attention_client.serving.families.reader import Calls
from attention_client.serving.grammars.compiler import Literal
from attention_client.serving.grammars.constraint import Constraint
from attention_client.serving.grammars.source import Source

__all__ = ["Form"]


@dataclass(frozen=True)
class Form:
    """The form that an answer must have.

    Attributes:
        field: The field of the request that asks for it, for errors.
        source: Builds the grammar.
        reading: Arguments of `AnswerReader` for such an answer.
    """

    field: str
    source: Callable[[Literal], Source]
    reading: dict[str, Any] = data_field(default_factory=dict)

    @classmethod
    def of(cls, constraint: Constraint) -> Form:
        """Make the form of an answer that follows a constraint from its first to its last token."""
        return cls(constraint.field, lambda _literal: Source((constraint.part,)))

    @classmethod
    def of_content(cls, field: str, source: Callable[[Literal], Source], calls: Calls) -> Form:
        """Make the form of an answer whose text has no markup, except calls in place of the text."""
        return cls(field, source, {"is_content": calls is Calls.NEVER, "calls": calls})
