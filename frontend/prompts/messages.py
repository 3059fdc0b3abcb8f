"""Messages and tools in the bodies of chat requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, model_validator

from frontend.prompts.body import Strict, check_depth

__all__ = ["FunctionCall", "FunctionTool", "Message", "Tool", "ToolCallIn"]

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHTS = ("thinking", "reasoning")
_ROLES = {"developer": "system", "function": "tool"}  # templates use the second name


class ContentPart(Strict):
    """A part of a message's content: text, or reasoning of the model."""

    type: str
    text: Any = None
    refusal: Any = None
    thinking: Any = None
    reasoning: Any = None
    summary: Any = None
    signature: Any = None  # accepted, but not checked

    def words(self) -> str:
        """Return the part's text; of reasoning it may be a list."""
        found = self.text or self.refusal or self.thinking or self.reasoning or self.summary or ""
        pieces = found if isinstance(found, list) else [found]
        return "\n".join(str(p.get("text", "") if isinstance(p, dict) else p) for p in pieces)


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts, each with a type")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError("must be a string or a list of parts, each with a type")
        if kind not in (*_TEXTS, *_THOUGHTS):
            raise ValueError(f"has a part of type {kind!r}; this model reads text parts only")
        if kind in _TEXTS and not isinstance(part.get(_TEXTS[kind]), str):
            raise ValueError("has a text part without a text")
    return parts


class FunctionCall(Strict):
    """A tool call that the model made in an earlier turn, perhaps with arguments that are no JSON."""

    name: str
    arguments: Annotated[Any, AfterValidator(check_depth)] = None

    @property
    def text(self) -> str:
        """The arguments as text; none at all are an empty object."""
        if isinstance(self.arguments, str):
            return "{}" if self.arguments.strip() in ("", "null") else self.arguments
        return json.dumps(self.arguments or {}, ensure_ascii=False)


class ToolCallIn(Strict):
    """A tool call in a message of the history."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: Any = None  # its position, which the list has, too
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call in the form of chat templates, with the arguments as text."""
        function = {"name": self.function.name, "arguments": self.function.text}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(Strict):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | list[ContentPart] | None,
        BeforeValidator(_content, json_schema_input_type=str | list[str | ContentPart] | None),
    ] = None
    name: str | None = None
    refusal: str | None = None
    # Names of the same, in the order in which they count.
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    function_call: FunctionCall | None = None  # OpenAI's older form of one tool call
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _something_is_said(self) -> Message:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of chat templates: one text, and the fields that say something."""
        parts = self.content or []
        if isinstance(parts, str):
            parts = [ContentPart(type="text", text=parts)]
        thoughts = [part.words() for part in parts if part.type in _THOUGHTS]
        texts = [part.words() for part in parts if part.type not in _THOUGHTS]
        reasoning = self.reasoning_content or self.reasoning or self.thinking
        calls = self.tool_calls or []
        if self.function_call is not None and not calls:
            calls = [ToolCallIn(function=self.function_call)]
        fields = {
            "name": self.name,
            "reasoning_content": reasoning or "\n".join(thoughts),
            "tool_calls": [call.for_template() for call in calls],
            "tool_call_id": self.tool_call_id,
        }
        return {
            "role": _ROLES.get(self.role, self.role),
            "content": "\n".join(texts) or self.refusal or "",
            **{name: value for name, value in fields.items() if value},
        }


class FunctionTool(Strict):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

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

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form of chat templates, which read the properties of its parameters."""
        tool = self.model_dump()
        empty = {"type": "object", "properties": {}}
        tool["function"]["parameters"] = empty | self.function.parameters
        return tool
