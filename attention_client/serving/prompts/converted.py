"""Bodies of other chat APIs, read as the chat request that each stands for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

from attention_client.serving.api_error import ApiError
from attention_client.serving.grammars.constraint import Constraint
from attention_client.serving.prompts.bodies import ChatRequest
from attention_client.serving.prompts.body import Body, parse

__all__ = ["ChatBody", "ConvertedRequest", "convert", "joined"]

_Request = TypeVar("_Request", bound=Body)


class ChatBody(Body):
    """The body of an API whose requests are chats."""

    # Names of the chat request's fields in this body, for errors; the first that fits counts.
    names: ClassVar[Mapping[str, str]]

    def found_for_chat(self) -> dict[str, Any]:
        """Return what the chat request's reading finds beside its settings (`Body.found`)."""
        return self.found

    @abstractmethod
    def for_chat(self) -> dict[str, Any]:
        """Return the chat request. Raises ApiError (400) that names the body's field."""


def convert(cls: type[_Request], body_class: type[ChatBody], fields: dict[str, Any]) -> _Request:
    """Validate a body and convert it. Raises ApiError (400) that names the field of the body."""
    body = parse(body_class, fields)
    chat = {name: value for name, value in body.for_chat().items() if value not in (None, [], {})}
    try:
        request = parse(cls, chat)
    except ApiError as error:
        name = next((name for name in body.names if (error.param or "").startswith(name)), "")
        if not name:
            raise
        message = error.message.replace(name, body.names[name])
        code = error.code or "invalid_value"
        raise ApiError.invalid(body.names[name], message, code) from None
    request.found.update(body.found_for_chat())
    return request


class ConvertedRequest(ChatRequest):
    """The chat request that the body of another API stands for."""

    body_class: ClassVar[type[ChatBody]]

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Validate a body and convert it. Raises ApiError (400) that names the field of the body."""
        return convert(cls, cls.body_class, fields)

    @property
    def constraint(self) -> Constraint | None:
        """The form that the answer must have, with its field's name in the body; None: any text."""
        found = super().constraint
        return found and replace(found, field=self.body_class.names.get(found.field, found.field))


def joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join messages of one role that follow one another, except results of tools.

    Templates expect that the roles alternate, and the system's text in one message.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        before = turns[-1] if turns else {}
        if message["role"] == "tool" or message["role"] != before.get("role"):
            turns.append(dict(message))
            continue
        for name in ("content", "tool_calls"):
            if message.get(name):
                before[name] = _parts(before.get(name)) + _parts(message[name])
        thoughts = (before.get("reasoning_content"), message.get("reasoning_content"))
        before["reasoning_content"] = "\n".join(filter(None, thoughts)) or None
    # A thought alone is a message without text.
    return [{"content": ""} | turn if turn["role"] == "assistant" else turn for turn in turns]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    # What is no list is refused later, by name.
    return content if isinstance(content, list) else [content] if content else []
