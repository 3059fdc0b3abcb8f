"""Bodies of other chat APIs, read as the chat request that each stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from eaas.generation.errors import ApiError
from frontend.prompts.bodies import ChatRequest
from frontend.prompts.body import Body, parse
from frontend.prompts.constraint import Constraint

__all__ = ["ChatBody", "Converted", "ConvertedRequest", "called", "joined", "response_format"]


class ChatBody(Body):
    """The body of an API whose requests are chats. The chat request checks the values that both have."""

    # Names of the chat request's fields in this body, for errors; the first that fits counts.
    names: ClassVar[Mapping[str, str]]

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the chat request, and note in `found` what the answer needs beside it.

        Raises ApiError (400) that names the body's field.
        """
        return {name: getattr(self, name) for name in ChatBody.model_fields}

    @classmethod
    def named(cls, field: str) -> str:
        """Return the name in this body of a field of the chat request, or of a part of it."""
        # Positions in lists differ: messages are joined, and tools left out.
        field = field.partition("[")[0]
        name = next((name for name in cls.names if field.startswith(name)), "")
        return cls.names.get(name, "") + field.removeprefix(name)


class Converted(Body):
    """A request for which the body of another API stands."""

    body_class: ClassVar[type[ChatBody]]

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Validate a body and convert it. Raises ApiError (400) that names the field of the body."""
        body = parse(cls.body_class, fields)
        chat = {
            name: value for name, value in body.for_chat().items() if value not in (None, [], {})
        }
        try:
            request = super().read(chat)
        except ApiError as error:
            if error.param is None:
                raise
            name = body.named(error.param)
            message = error.message.replace(error.param, name)
            raise ApiError(400, message, param=name, code=error.code) from None
        request.found.update(body.found)
        return request


class ConvertedRequest(Converted, ChatRequest):
    """The chat request that the body of another API stands for."""

    @property
    def constraint(self) -> Constraint | None:
        """The form that the answer must have, with its field's name in the body; None: any text."""
        found = super().constraint
        return found and replace(found, field=self.body_class.named(found.field))


def response_format(form: Any) -> Any:
    """Return the form of an answer, with its schema in it, as the chat request's response_format."""
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "", "schema": None} | form}


def joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join messages of one role that follow one another, except results of tools, which get names.

    Templates expect that the roles alternate, and the system's text in one message.
    """
    turns: list[dict[str, Any]] = []
    names: dict[str, Any] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[str(call["id"])] = call["function"]["name"]
        before = turns[-1] if turns else {}
        if message["role"] == "tool":
            turns.append({"name": names.get(str(message["tool_call_id"])), **message})
        elif message["role"] != before.get("role"):
            turns.append(dict(message))
        else:
            for name in ("content", "tool_calls"):
                if message.get(name):
                    before[name] = _parts(before.get(name)) + _parts(message[name])
    return turns


def _parts(content: Any) -> list[Any]:
    # What is no list is refused later, by name.
    return content if isinstance(content, list) else [content] if content else []


def called(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return the message with a tool call of the model."""
    function = {"name": name, "arguments": arguments}
    call = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
