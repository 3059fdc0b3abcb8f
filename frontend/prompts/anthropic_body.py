"""The JSON bodies of /v1/messages and its count_tokens (Anthropic's API), and the requests they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from eaas.generation.errors import ApiError
from frontend.prompts.bodies import TokenizeRequest
from frontend.prompts.body import Stops, Strict, other_fields
from frontend.prompts.converted import (
    ChatBody,
    Converted,
    ConvertedRequest,
    called,
    joined,
    response_format,
)

__all__ = ["CountBody", "CountRequest", "MessagesBody", "MessagesRequest"]

# Claude Code's first block of the system's text: it differs in each request, so nothing after it could be
# taken from the cache.
_BILLING = "x-anthropic-billing-header"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


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


Blocks = Annotated[
    list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block] | None)
]


class MessageIn(Strict):
    """A message of the history."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Thinking(Strict):
    """Whether the model thinks first, and whether the answer shows that."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class CountBody(ChatBody, other_fields("CountBody")):  # type: ignore[misc]
    """Body of /v1/messages/count_tokens."""

    names: ClassVar[dict[str, str]] = {
        "reasoning_effort": "output_config.effort",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    messages: Annotated[list[MessageIn], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    system: Blocks = Field([])
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # an earlier name
    stop_sequences: Stops = Field([])

    def for_chat(self) -> dict[str, Any]:
        """Return the chat request. Raises ApiError (400) for a tool or a block that has no place in it."""
        fields = super().for_chat() | {"stop": self.stop_sequences, "max_tokens": self.max_tokens}
        fields["messages"] = messages = joined(self._messages())
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and "tool_calls" not in last:
            is_begun = any(part["type"] == "text" for part in last["content"])
            fields["continue_final_message"] = is_begun or None
        fields["tools"] = [_tool(at, tool) for at, tool in enumerate(self.tools or ())]
        if choice := self.tool_choice:
            kind, name = str(choice.get("type")), choice.get("name") or ""
            named = {"type": "function", "function": {"name": name}}
            fields["tool_choice"] = _CHOICES.get(kind, named)
            is_single = choice.get("disable_parallel_tool_use")
            fields["parallel_tool_calls"] = False if is_single else None
            if kind == "none":
                del fields["tools"]
        if self.thinking is not None:
            is_on = self.thinking.type != "disabled"
            # The names of Qwen's and of DeepSeek's templates.
            switches = {"enable_thinking": is_on, "thinking": is_on}
            fields["chat_template_kwargs"] = switches | (self.chat_template_kwargs or {})
            fields["include_reasoning"] = is_on and self.thinking.display != "omitted"
        output = self.output_config or {}
        effort = output.get("effort")
        fields["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
        fields["response_format"] = response_format(output.get("format") or self.output_format)
        return fields

    def _messages(self) -> Iterator[dict[str, Any]]:
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
                    yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
                elif block.type == "tool_use":
                    yield called(block.id, block.name, block.input)
                elif block.type == "thinking":
                    thought = {"type": "thinking", "thinking": block.thinking}
                    yield {"role": role, "content": [thought] if block.thinking else ""}
                elif block.type != "redacted_thinking":
                    yield {"role": role, "content": [_text(block, field)]}


class MessagesBody(CountBody):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0)]


def _tool(at: int, tool: dict[str, Any]) -> dict[str, Any]:
    kind, schema = tool.get("type"), tool.get("input_schema")
    if kind not in (None, "custom") or schema is None:
        field, name = f"tools[{at}]", kind or tool.get("name")
        reason = f"there is no built-in tool {name!r} here; offer tools with an input_schema."
        raise ApiError.invalid(field, f"'{field}': {reason}", "unsupported_parameter")
    given = {name: tool.get(name) for name in ("name", "description", "strict")}
    function = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": function | {"parameters": schema}}


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

    # There may be no room for so many.
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    @property
    def token_budget(self) -> int | None:
        """None: the answer ends where the context does; 0: only the prompt is processed."""
        return None if self.max_tokens else 0


class CountRequest(Converted, TokenizeRequest):
    """The request for the tokens of a prompt that a body of /v1/messages/count_tokens stands for."""

    body_class: ClassVar[type[ChatBody]] = CountBody
