"""The form that an answer must have, as a grammar, and how tool calls are read from such an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from attention_client.serving.grammars.compiler import Literal
from attention_client.serving.grammars.constraint import Constraint
from attention_client.serving.grammars.source import Source

__all__ = ["Form", "JsonCalls"]


class JsonCalls:
    """Reads tool calls from an answer that is JSON: the arguments of one function, or a list of calls.

    Args:
        name: The function whose arguments the answer is; None: the answer is a list of objects with the
            fields name and parameters.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._text = ""

    def push(self, text: str) -> None:
        """Add a piece of the answer."""
        self._text += text

    def calls(self) -> Iterator[tuple[str, str]]:
        """Yield the function and the arguments (JSON) of each call, after the last piece.

        Of an answer that was cut off, the arguments of one function are incomplete, and the last call of a
        list is missing.
        """
        text = self._text
        if self._name is not None:
            if text:
                yield self._name, text
            return
        decoder, position = json.JSONDecoder(), text.find("{")
        while position >= 0:
            try:
                call, end = decoder.raw_decode(text, position)
            except ValueError:
                return
            yield call["name"], json.dumps(call["parameters"], ensure_ascii=False)
            position = text.find("{", end)


@dataclass(frozen=True)
class Form:
    """The form that an answer must have.

    Attributes:
        field: The field of the request that asks for it, for errors.
        source: Builds the grammar.
        reader: Makes the reader of an answer whose JSON is tool calls; None: the answer stays as it is.
        names_tool: Whether the request names the function; then, as in OpenAI's API, the answer ends with
            the reason "stop".
    """

    field: str
    source: Callable[[Literal], Source]
    reader: Callable[[], JsonCalls] | None = None
    names_tool: bool = False

    @classmethod
    def of(cls, constraint: Constraint) -> Form:
        """Make the form of an answer that follows a constraint from its first to its last token."""
        return cls(constraint.field, lambda _literal: Source((constraint.part,)))
