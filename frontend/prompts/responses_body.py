"""The JSON body of /v1/responses, and the chat request that it stands for.

Each of its tools becomes a function of the chat request, and its calls become items again.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from eaas.generation.errors import ApiError
from frontend.prompts.bodies import ChatRequest
from frontend.prompts.body import Strict, other_fields
from frontend.prompts.converted import (
    ChatBody,
    ConvertedRequest,
    called,
    joined,
    response_format,
)

__all__ = ["ResponsesBody", "ResponsesRequest", "call_item", "input_items", "sealed"]

# Calls of OpenAI's own tools in the history of a client that changed its model.
_FOREIGN = ("web_search_call", "tool_search_call", "tool_search_output", "compaction")
# The response repeats these fields of the request, with these values if they are left out.
_REPEATED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None,
    "reasoning": None, "safety_identifier": None, "store": True, "temperature": None, "text": {},
    "tool_choice": "auto", "tools": [], "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip
# Codex CLI sends these beside its functions, whatever the model.
_LEFT_OUT = {"image_generation", "local_shell", "tool_search", "web_search", "web_search_preview"}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

_Tool = dict[str, Any]
_Items = Annotated[list[dict[str, Any]], Field(min_length=1)]


def input_items(given: Any) -> Any:
    """Return the input as items: a string is a user's message."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ToolIn(Strict):
    """A tool. The chat request checks the other fields of a function."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    format: dict[str, Any] | None = None
    tools: list[ToolIn] | None = None


class ResponsesBody(ChatBody, other_fields("ResponsesBody")):  # type: ignore[misc]
    """Body of /v1/responses. The endpoint puts the history of `previous_response_id` into the input."""

    names: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }

    input: Annotated[_Items, BeforeValidator(input_items, json_schema_input_type=str | _Items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[ToolIn] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the chat request. Raises ApiError (400) for a tool or an item that has no place in it."""
        given = self.model_dump(include=set(_REPEATED), exclude_unset=True)
        repeated = _REPEATED | {name: each for name, each in given.items() if each is not None}
        repeated["text"] = {"format": {"type": "text"}} | repeated["text"]
        tools, ignored = _chat_tools(repeated["tools"])
        self.found["repeated"] = repeated
        self.found["ignored"] += [f"tools.{kind}" for kind in ignored]
        self.found["seals"] = "reasoning.encrypted_content" in (self.include or ())
        fields = super().for_chat() | {"seed": self.seed}
        fields["parallel_tool_calls"] = self.parallel_tool_calls
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["response_format"] = response_format(repeated["text"]["format"])
        fields["reasoning_effort"] = (self.reasoning or {}).get("effort")
        fields["tool_choice"], fields["tools"] = _chat_choice(self.tool_choice, tools)
        fields["messages"] = joined(self._messages())
        return fields

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        for at, item in enumerate(self.input):
            kind, call_id = item.get("type", "message"), item.get("call_id")
            if kind == "message":
                role = "system" if item.get("role") == "developer" else item.get("role")
                content = {} if item.get("content") is None else {"content": item["content"]}
                yield {"role": role, **content}
            elif kind == "reasoning":
                thought = {"type": "reasoning", "reasoning": _thought(item)}
                yield {"role": "assistant", "content": [thought] if thought["reasoning"] else ""}
            elif kind == "function_call":
                yield called(call_id, _function_name(item), item.get("arguments"))
            elif kind == "custom_tool_call":
                yield called(call_id, _function_name(item), {"input": item.get("input")})
            elif kind in ("function_call_output", "custom_tool_call_output"):
                yield {"role": "tool", "tool_call_id": call_id, "content": item.get("output")}
            elif kind not in _FOREIGN:
                reason = f"'input[{at}]': this endpoint reads no items of type {kind!r}."
                raise ApiError.invalid(f"input[{at}]", reason)


def _function_name(tool: _Tool) -> str | None:
    """Return the name of the function that stands for a tool or a call; a namespace goes before it."""
    name, namespace = tool.get("name"), tool.get("namespace")
    return f"{namespace}__{name}" if namespace else name


def _offered(tools: Sequence[_Tool]) -> dict[str | None, _Tool]:
    """Return functions and custom tools by function name, also those of a namespace, which they then name."""
    found: dict[str | None, _Tool] = {}
    for tool in tools:
        if tool.get("type") == "namespace":
            space = {"namespace": tool.get("name")}
            found |= _offered([each | space for each in tool.get("tools") or ()])
        elif tool.get("type") in ("function", "custom"):
            found[_function_name(tool)] = tool
    return found


def _chat_tools(tools: Sequence[_Tool]) -> tuple[list[_Tool], list[str]]:
    """Return the chat request's tools, and the built-in tools that are ignored, if there are others.

    A custom tool becomes a function of one text, its input. Raises ApiError (400) for other built-in tools.
    """
    offered = _offered(tools)
    kinds = [tool.get("type") for tool in tools]
    ignored = [kind for kind in kinds if kind in _LEFT_OUT and offered]
    for kind in kinds:
        if kind not in ("function", "custom", "namespace", *ignored):
            reason = f"there is no built-in tool {kind!r} here; offer functions or custom tools."
            raise ApiError.invalid("tools", f"'tools': {reason}", "unsupported_parameter")
    found = []
    for name, tool in offered.items():
        function = {key: tool.get(key) for key in ("description", "parameters", "strict")}
        if tool["type"] == "custom":
            function["parameters"], form = _INPUT, tool.get("format") or {}
            if form.get("type") == "grammar":
                rules = f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
                function["description"] = f"{tool.get('description') or ''}\n{rules}"
        given = {key: value for key, value in function.items() if value is not None}
        found.append({"type": "function", "function": {"name": name, **given}})
    return found, ignored


def _chat_choice(choice: Any, tools: list[_Tool]) -> tuple[Any, list[_Tool]]:
    """Return the chat request's tool_choice, unchecked, and those of its tools that the choice allows."""
    if not isinstance(choice, dict):
        return choice, tools
    if choice.get("type") == "allowed_tools":
        given = choice.get("tools")
        named = given if isinstance(given, list) else []
        allowed = [_function_name(tool) for tool in named if isinstance(tool, dict)]
        return choice.get("mode"), [each for each in tools if each["function"]["name"] in allowed]
    kind = "function" if choice.get("type") == "custom" else choice.get("type")
    return {"type": kind, "function": {"name": _function_name(choice)}}, tools


def call_item(name: str, tools: Sequence[_Tool]) -> dict[str, Any]:
    """Return the beginning of the item for a call of a function, by the tool that it stands for."""
    tool = _offered(tools).get(name, {"name": name})
    kind = "custom_tool_call" if tool.get("type") == "custom" else "function_call"
    return {"type": kind} | {key: tool[key] for key in ("name", "namespace") if key in tool}


def sealed(thought: str) -> str:
    """Return reasoning as the `encrypted_content` of its item, which clients send back unread."""
    return base64.b64encode(thought.encode()).decode()


def _thought(item: dict[str, Any]) -> Any:
    if item.get("content") or not item.get("encrypted_content"):
        return item.get("content") or item.get("summary")
    try:
        return base64.b64decode(str(item["encrypted_content"]), validate=True).decode()
    except ValueError:
        return item.get("summary")  # another server's seal


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

    def fitted(self, encode: Callable[[ChatRequest], list[int]]) -> list[int]:
        """Return the prompt, which loses as few of the oldest messages as possible if it is too long.

        The system's messages at the beginning and the newest turn stay. Raises ApiError (400).

        Args:
            encode: Returns the prompt of the messages that are left. Raises ApiError (400).
        """
        messages = self.messages
        roles = [message.role for message in messages]
        first = int(roles[0] == "system")

        def prompt(start: int) -> list[int]:
            self.messages = messages[:first] + messages[start:]
            return encode(self)

        def fits(start: int) -> bool:
            try:
                return bool(prompt(start))
            except ApiError as error:
                if error.code != "context_length_exceeded":
                    raise
                return False

        # A chat begins with a user's message or, after the last of these, with one of the assistant: never
        # with a tool's result without its call.
        users = [at for at, role in enumerate(roles) if role == "user"]
        last = max([first, *users])
        own = [at for at, role in enumerate(roles) if role == "assistant" and at > last]
        starts = [first, *users, *own]
        # The later the start, the shorter the prompt.
        at = bisect_left(starts, True, key=fits)
        return prompt(starts[min(at, len(starts) - 1)])
