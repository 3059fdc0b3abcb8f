"""Tools of /v1/responses: each becomes a function of the chat request, and its calls become items again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict

from attention_client.serving.prompts.fields import Strict
from eaas.generation.errors import ApiError

__all__ = ["ToolIn", "call_item", "chat_choice", "chat_tools", "function_name"]

# Codex CLI sends these beside its functions, whatever the model.
_LEFT_OUT = {"image_generation", "local_shell", "tool_search", "web_search", "web_search_preview"}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

_Tool = dict[str, Any]


class ToolIn(Strict):
    """A tool. The chat request checks the other fields of a function."""

    model_config = ConfigDict(extra="allow")

    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    format: dict[str, Any] | None = None
    tools: list[ToolIn] | None = None


def function_name(tool: _Tool) -> str | None:
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
            found[function_name(tool)] = tool
    return found


def chat_tools(tools: Sequence[_Tool]) -> tuple[list[_Tool], list[str]]:
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


def chat_choice(choice: Any, tools: list[_Tool]) -> tuple[Any, list[_Tool]]:
    """Return the chat request's tool_choice, unchecked, and those of its tools that the choice allows."""
    if not isinstance(choice, dict):
        return choice, tools
    if choice.get("type") == "allowed_tools":
        given = choice.get("tools")
        named = given if isinstance(given, list) else []
        allowed = [function_name(tool) for tool in named if isinstance(tool, dict)]
        return choice.get("mode"), [each for each in tools if each["function"]["name"] in allowed]
    kind = "function" if choice.get("type") == "custom" else choice.get("type")
    return {"type": kind, "function": {"name": function_name(choice)}}, tools


def call_item(name: str, tools: Sequence[_Tool]) -> dict[str, Any]:
    """Return the beginning of the item for a call of a function, by the tool that it stands for."""
    tool = _offered(tools).get(name, {"name": name})
    kind = "custom_tool_call" if tool.get("type") == "custom" else "function_call"
    return {"type": kind} | {key: tool[key] for key in ("name", "namespace") if key in tool}
