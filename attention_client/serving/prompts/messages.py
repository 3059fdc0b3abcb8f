"""Messages and tools in the bodies of chat requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator

from attention_client.serving.grammars.constraint import check_depth
from attention_client.serving.prompts.fields import Strict

__all__ = ["FunctionCall", "FunctionTool", "Message", "Tool", "ToolCallIn"]

_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "null"}, {"type": "string"}, _PARTS]}


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts, each with a type")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError("must be a string or a list of parts, each with a type")
        if kind != "text":
            raise ValueError(f"has a part of type {kind!r}; this model reads text parts only")
        if not isinstance(part.get("text"), str):
            raise ValueError("has a text part without a text")
    return value


class FunctionCall(BaseModel):
    """A tool call that the model made in an earlier turn."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> FunctionCall:
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError("arguments must be a JSON object in a string")
        return self


class ToolCallIn(BaseModel):
    """A tool call in a message of the history."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call in the form of chat templates, with the arguments as an object."""
        call = self.model_dump(exclude_none=True)
        call["function"]["arguments"] = json.loads(self.function.arguments)
        return call


class Message(BaseModel):
    """One chat message. Fields of answers that prompts do not use are accepted."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={
            "anyOf": [
                {
                    "properties": {"content": {"type": ["string", "array"]}},
                    "required": ["content"],
                },
                {
                    "properties": {
                        "role": {"const": "assistant"},
                        "tool_calls": {"type": "array", "minItems": 1},
                    },
                    "required": ["tool_calls"],
                },
            ]
        },
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)] = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _something_is_said(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of chat templates: one text, and "system" for "developer"."""
        # "developer" is OpenAI's newer name; templates use the older one.
        role = "system" if self.role == "developer" else self.role
        text = ""
        # Text in a message with tool calls is the markup of those calls.
        if self.tool_calls is None:
            text = self.content or ""
            if not isinstance(text, str):
                text = " ".join(part["text"] for part in text)
        message: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str

    @model_validator(mode="after")
    def _parameters_are_an_object(self) -> FunctionTool:
        if not isinstance(self.parameters, dict):
            raise ValueError("parameters must be a JSON schema: an object")
        check_depth(self.parameters)
        return self

    @property
    def parameters(self) -> Any:
        """The JSON schema of the arguments."""
        given = (self.model_extra or {}).get("parameters")
        return {"type": "object", "properties": {}} if given is None else given


class Tool(Strict):
    """A tool that the request offers to the model."""

    type: Literal["function"]
    function: FunctionTool
