"""The JSON bodies of /v1/messages and its count_tokens (Anthropic's API), and the requests they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from attention_client.serving.api_error import ApiError
from attention_client.serving.grammars.constraint import JsonSchema
from attention_client.serving.prompts.converted import ChatBody, ConvertedRequest, convert, joined
from attention_client.serving.prompts.fields import Stops, Strict, other_fields
from attention_client.serving.prompts.tokenize_bodies import TokenizeRequest

__all__ = ["CountBody", "CountRequest", "MessagesBody", "MessagesRequest"]

# Claude Code's first block of the system's text: it differs in each request, so nothing after it could be
# taken from the cache.
_BILLING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def _as_blocks(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return [{"type": "text", "text": value}] if value else []
    return value


class Block(Strict):
    """A part of a message's content; each type has some of these fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Blocks = Field([])
    is_error: bool | None = None


Blocks = Annotated[
    list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block] | None)
]


class MessageIn(Strict):
    """A message of the history."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolIn(Strict):
    """A tool that the client runs."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceIn(Strict):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the model thinks first, and whether the answer shows that."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The JSON schema of the answer's text."""

    type: Literal["json_schema"]
    definition: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(Strict):
    """How much the model thinks, and the answer's form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(ChatBody, other_fields("CountBody")):  # type: ignore[misc]
    """Body of /v1/messages/count_tokens."""

    names: ClassVar[dict[str, str]] = {
        "messages": "messages",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
        "tools": "tools",
        "tool_choice": "tool_choice",
    }

    messages: Annotated[list[MessageIn], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    system: Blocks = Field([])
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoiceIn | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an earlier name
    stop_sequences: Stops = Field([])
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the chat request. Raises ApiError (400) for a tool or a block that has no place in it."""
        fields = {
            name: getattr(self, name)
            for name in ("model", "stream", "temperature", "top_p", "top_k")
        }
        fields["messages"] = messages = joined(self._messages())
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
            fields["continue_final_message"] = True
        fields["tools"] = [_tool(at, tool) for at, tool in enumerate(self.tools or ())]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            fields["tool_choice"] = _CHOICES.get(choice.type, named)
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if self.thinking is not None:
            # The names of Qwen's and of DeepSeek's templates.
            switches = dict.fromkeys(
                ("enable_thinking", "thinking"), self.thinking.type != "disabled"
            )
            fields["chat_template_kwargs"] = switches | (self.chat_template_kwargs or {})
            hides = self.thinking.type == "disabled" or self.thinking.display == "omitted"
            fields["include_reasoning"] = not hides
        output = self.output_config or OutputConfig()
        fields["reasoning_effort"] = _EFFORTS.get(output.effort or "")
        if form := output.format or self.output_format:
            schema = {"name": "output", "schema": form.definition}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields | {"stop": self.stop_sequences}

    def _messages(self) -> Iterator[dict[str, Any]]:
        names: dict[str | None, str | None] = {}
        for block in self.system:
            if not (block.text or "").startswith(_BILLING):
                yield {"role": "system", "content": [_text(block, "system")]}
        for at, message in enumerate(self.messages):
            # Claude Code lets the system speak after the user, where many templates refuse it.
            role = "user" if message.role == "system" else message.role
            field = f"messages[{at}].content"
            if not message.content:
                yield {"role": role, "content": ""}
            for block in message.content:
                if block.type == "tool_result":
                    content = [_text(each, field) for each in block.content]
                    result = {"tool_call_id": block.tool_use_id, "content": content or ""}
                    yield {"role": "tool", "name": names.get(block.tool_use_id), **result}
                elif block.type == "tool_use":
                    names[block.id] = block.name
                    arguments = json.dumps(block.input or {}, ensure_ascii=False)
                    function = {"name": block.name, "arguments": arguments}
                    call = {"id": block.id, "type": "function", "function": function}
                    yield {"role": role, "tool_calls": [call]}
                elif block.type == "thinking":
                    yield {"role": role, "reasoning_content": block.thinking}
                elif block.type != "redacted_thinking":
                    yield {"role": role, "content": [_text(block, field)]}

    def found_for_chat(self) -> dict[str, Any]:
        """Return what the body has beside the chat request."""
        blocks = [block for message in self.messages for block in message.content]
        unused = {
            "thinking.budget_tokens": self.thinking and self.thinking.budget_tokens,
            "messages.content.is_error": any(block.is_error for block in blocks),
        }
        ignored = (*self.ignored, *(name for name, value in unused.items() if value))
        return {"ignored": ignored, "most_tokens": self.max_tokens}


class MessagesBody(CountBody):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0)]


def _tool(at: int, tool: ToolIn) -> dict[str, Any]:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        kind, field = tool.type or tool.name, f"tools[{at}]"
        reason = (
            f"'{field}': there is no built-in tool {kind!r} here; offer tools with an input_schema."
        )
        raise ApiError.invalid(field, reason, "unsupported_parameter")
    given = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": given | {"parameters": tool.input_schema}}


def _text(block: Block, field: str) -> dict[str, Any]:
    text = block.text if block.type == "text" else None
    if block.type == "document" and block.source and block.source.get("type") == "text":
        text = block.source.get("data")
    if not isinstance(text, str):
        reason = f"'{field}': this model reads text, and no blocks of type {block.type!r}."
        raise ApiError.invalid(field, reason)
    return {"type": "text", "text": text}


class MessagesRequest(ConvertedRequest):
    """The chat request that a body of /v1/messages stands for."""

    body_class: ClassVar[type[ChatBody]] = MessagesBody

    @property
    def most_tokens(self) -> int:
        """Most tokens of the answer, which may be more than there is room for."""
        return int(self.found["most_tokens"])

    @property
    def token_budget(self) -> int | None:
        """None: the answer ends where the context does; 0: only the prompt is processed."""
        return None if self.found.get("most_tokens", 1) else 0


class CountRequest(TokenizeRequest):
    """The request for the tokens of a prompt that a body of /v1/messages/count_tokens stands for."""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Validate a body and convert it. Raises ApiError (400) that names the field of the body."""
        request = convert(cls, CountBody, fields)
        if (fields.get("tool_choice") or {}).get("type") == "none":
            request.tools = None
        return request
