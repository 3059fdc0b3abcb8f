"""Tools of /v1/responses: each becomes a function of the chat request, and its calls become items again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, ValidationError

from attention_client.serving.api_error import ApiError
from attention_client.serving.prompts.fields import Strict

__all__ = [
    "ToolChoice",
    "ToolIn",
    "call_item",
    "chat_choice",
    "chat_tools",
    "function_call",
    "function_name",
    "left_out",
]

# Codex CLI sends these beside its functions, whatever the model.
_LEFT_OUT = {"image_generation", "local_shell", "tool_search", "web_search", "web_search_preview"}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ToolIn(Strict):
    """A tool, a reference to one, or a choice of some. Other fields are of built-in tools."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ToolIn] | None = None


def _chosen(value: Any) -> Any:
    if isinstance(value, dict):
        try:
            return ToolIn.model_validate(value).model_dump(exclude_unset=True)
        except ValidationError:
            value = ""
    if value in (None, "auto", "none", "required"):
        return value
    raise ValueError("must be auto, none, required or a tool")


_Choices = Literal["auto", "none", "required"] | ToolIn | None
ToolChoice = Annotated[Any, BeforeValidator(_chosen, json_schema_input_type=_Choices)]
"""auto, none, required, a tool by name, or a choice of some tools."""


def function_name(tool: dict[str, Any]) -> str | None:
    """Return the name of the function that stands for a tool or a call; a namespace goes before it."""
    name, namespace = tool.get("name"), tool.get("namespace")
    return f"{namespace}__{name}" if namespace else name


def _offered(tools: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the functions and custom tools, also those of a namespace, which they then name."""
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from (each | {"namespace": tool.get("name")} for each in tool.get("tools") or ())
        elif tool.get("type") in ("function", "custom"):
            yield tool


def left_out(tools: Sequence[dict[str, Any]]) -> list[str]:
    """Return the built-in tools that are ignored, because there are functions beside them."""
    kinds = [str(tool.get("type")) for tool in tools]
    return [kind for kind in kinds if kind in _LEFT_OUT] if any(_offered(tools)) else []


def chat_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat request's tools. A custom tool becomes a function of one text, its input.

    Raises ApiError (400) for a built-in tool that is not left out.
    """
    known = {"function", "custom", "namespace", *left_out(tools)}
    wrong = next((tool.get("type") for tool in tools if tool.get("type") not in known), None)
    if wrong is not None:
        reason = (
            f"'tools': there is no built-in tool {wrong!r} here; offer functions or custom tools."
        )
        raise ApiError.invalid("tools", reason, "unsupported_parameter")
    found = []
    for tool in _offered(tools):
        function = {"name": function_name(tool), "description": tool.get("description")}
        function |= {"parameters": tool.get("parameters"), "strict": tool.get("strict")}
        if tool.get("type") == "custom":
            function["parameters"], form = _INPUT, tool.get("format") or {}
            if form.get("type") == "grammar":
                rules = f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
                function["description"] = f"{tool.get('description') or ''}\n{rules}"
        given = {name: value for name, value in function.items() if value is not None}
        found.append({"type": "function", "function": given})
    return found


def chat_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Return the chat request's tool_choice, and those of its tools that the choice allows."""
    if not isinstance(choice, dict):
        return choice, tools
    if choice.get("type") == "allowed_tools":
        allowed = [function_name(tool) for tool in choice.get("tools") or ()]
        return choice.get("mode"), [each for each in tools if each["function"]["name"] in allowed]
    kind = "function" if choice.get("type") == "custom" else choice.get("type")
    return {"type": kind, "function": {"name": function_name(choice)}}, tools


def function_call(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of the history with a call as a call in a chat message."""
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
    function = {"name": function_name(item), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def call_item(name: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the beginning of the item for a call of a function, by the tool that it stands for."""
    tool = next((each for each in _offered(tools) if function_name(each) == name), {"name": name})
    kind = "custom_tool_call" if tool.get("type") == "custom" else "function_call"
    return {"type": kind} | {key: tool[key] for key in ("name", "namespace") if key in tool}
