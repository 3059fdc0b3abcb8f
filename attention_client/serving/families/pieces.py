"""The pieces of a choice, of which the answers of all APIs are made."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Call", "Finish", "Reasoning", "Served"]


def _new_id() -> str:
    # Nine letters and digits: the templates of Mistral's models take no others.
    return secrets.token_hex(5)[:9]


class Reasoning(str):
    """Text of the model's reasoning. A piece that is a plain string is text of the answer."""

    __slots__ = ()


@dataclass(frozen=True)
class Call:
    """A tool call in the model's answer.

    Attributes:
        index: Its position among the answer's calls.
        name: The function.
        arguments: A JSON object as a string.
        id: Names the call in the message with its result.
    """

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=_new_id, compare=False)


@dataclass(frozen=True)
class Served:
    """The expert servers that computed the next piece of text: (token, expert) pairs by server."""

    servers: Mapping[str, int]


@dataclass(frozen=True)
class Finish:
    """The end of an answer: "stop" (an end token or a stop string), "length" or "tool_calls".

    Attributes:
        reason: One of these.
        stop: The request's stop string that ended the answer; None: none did.
    """

    reason: str
    stop: str | None = None
