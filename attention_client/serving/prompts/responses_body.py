"""The JSON body of /v1/responses, and the chat request that it stands for."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from attention_client.serving.api_error import ApiError
from attention_client.serving.grammars.constraint import JsonSchema
from attention_client.serving.prompts.converted import ChatBody, ConvertedRequest, joined
from attention_client.serving.prompts.fields import Strict, other_fields
from attention_client.serving.prompts.responses_tools import (
    ToolChoice,
    ToolIn,
    chat_choice,
    chat_tools,
    function_call,
    function_name,
    left_out,
)

__all__ = ["ResponsesBody", "ResponsesRequest", "input_items", "sealed"]

_TEXT_PARTS = ("input_text", "output_text", "text")
_SAME = ("model", "stream", "temperature", "top_p", "top_k", "seed", "chat_template_kwargs",
         "parallel_tool_calls")  # fmt: skip
# Calls of OpenAI's own tools in the history of a client that changed its model.
_FOREIGN = ("web_search_call", "tool_search_call", "tool_search_output", "compaction")
# The response repeats these fields of the request, with these values if they are left out.
_REPEATED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "reasoning": None, "safety_identifier": None, "store": True, "temperature": None,
    "tool_choice": "auto", "tools": [], "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip


class TextFormat(Strict):
    """The form of the answer: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    definition: Annotated[JsonSchema, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the field response_format of a chat request."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name or "", "schema": self.definition, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Any = None  # no effect


class ReasoningOptions(Strict):
    """Options of the model's reasoning."""

    effort: str | None = None
    summary: Any = None  # no effect: the reasoning itself is delivered
    generate_summary: Any = None


class Item(Strict):
    """An item of the input; each type has some of these fields."""

    type: str = "message"
    role: str | None = None
    content: Any = None
    summary: Any = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: Any = None


_Items = Annotated[list[Item], Field(min_length=1)]


def input_items(given: Any) -> Any:
    """Return the input as items: a string is a user's message."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesBody(ChatBody, other_fields("ResponsesBody")):  # type: ignore[misc]
    """Body of /v1/responses. The endpoint puts the history of `previous_response_id` into the input."""

    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "tools": "tools",
        "tool_choice": "tool_choice",
    }

    input: Annotated[_Items, BeforeValidator(input_items, json_schema_input_type=str | _Items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the chat request. Raises ApiError (400) for a tool or an item that has no place in it."""
        fields = {name: getattr(self, name) for name in _SAME}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.for_chat()
        tools = chat_tools(self._tools())
        fields["tool_choice"], fields["tools"] = chat_choice(self.tool_choice, tools)
        instructions = {"role": "system", "content": self.instructions}
        fields["messages"] = joined(
            [*([instructions] if self.instructions else ()), *_messages(self.input)]
        )
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["reasoning_effort"] = self.reasoning and self.reasoning.effort
        return fields

    def _tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]

    def found_for_chat(self) -> dict[str, Any]:
        """Return what the response repeats of the body, and what the chat request leaves out."""
        given = self.model_dump(include=_REPEATED.keys() - {"tools"}, exclude_none=True)
        tools = self._tools()
        ignored = (*self.ignored, *(f"tools.{kind}" for kind in left_out(tools)))
        seals = "reasoning.encrypted_content" in (self.include or ())
        repeated = _REPEATED | given | {"tools": tools}
        return {"ignored": ignored, "repeated": repeated, "seals": seals}


def _messages(items: list[Item]) -> Iterator[dict[str, Any]]:
    names: dict[str | None, str | None] = {}
    for at, item in enumerate(items):
        if item.type == "message":
            if item.content is None:
                raise ApiError.invalid("input", f"'input[{at}]': has no content.")
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": _texts(item.content)}
        elif item.type == "reasoning":
            yield {"role": "assistant", "reasoning_content": _thought(item)}
        elif item.type in ("function_call", "custom_tool_call"):
            given = item.model_dump()
            names[item.call_id] = function_name(given)
            yield {"role": "assistant", "tool_calls": [function_call(given)]}
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            result = {"tool_call_id": item.call_id, "content": _texts(item.output)}
            yield {"role": "tool", "name": names.get(item.call_id), **result}
        elif item.type not in _FOREIGN:
            reason = f"'input[{at}]': this endpoint reads no items of type {item.type!r}."
            raise ApiError.invalid(f"input[{at}]", reason)


def _texts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"}
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]


def sealed(thought: str) -> str:
    """Return reasoning as the `encrypted_content` of its item, which clients send back unread."""
    return base64.b64encode(thought.encode()).decode()


def _thought(item: Item) -> str:
    parts = item.content or ()
    if not parts and item.encrypted_content:
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except ValueError:
            parts = ()  # another server's
    parts = parts or item.summary or ()
    return "\n".join(str(part.get("text")) for part in parts if isinstance(part, dict))


class ResponsesRequest(ConvertedRequest):
    """The chat request that a body of /v1/responses stands for."""

    body_class: ClassVar[type[ChatBody]] = ResponsesBody
    messages_field: ClassVar[str] = "input"

    @property
    def repeated(self) -> dict[str, Any]:
        """The fields of the body that the response repeats."""
        return dict(self.found["repeated"])

    @property
    def seals(self) -> bool:
        """Whether items of reasoning have it as `encrypted_content`, too."""
        return bool(self.found["seals"])
