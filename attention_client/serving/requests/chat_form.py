"""Grammars of chat answers: reasoning first, then an answer in a given form, or tool calls.

Tool calls have the model's own format where that holds JSON, so that the model writes what it was trained
on. For other models the whole answer is JSON, as in vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from attention_client.serving.grammars.compiler import Literal
from attention_client.serving.grammars.constraint import Constraint
from attention_client.serving.grammars.source import Part, Source
from attention_client.serving.prompts.bodies import ChatRequest
from attention_client.serving.prompts.messages import FunctionTool
from attention_client.serving.requests.form import Form, JsonCalls

__all__ = ["chat_form"]

_REASONING = ("reasoning_content", "reasoning", "thinking")
_WHOLE_CALL = {"type": "function", "function": "{content}"}
_NAMED_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NOTES = {"$schema", "$defs", "definitions", "title", "description", "default", "examples"}
_PLAIN_OBJECT = _NOTES | {"type", "properties", "required"}
_PLAIN_LIST = _NOTES | {"type", "items", "minItems", "maxItems"}
_NAME_GROUP = re.compile(r"\(\?P<name>(?:[^()\\]|\\.)*\)")
_TERMINALS = r"""WS: /[ \n]{1,8}/
TEXT: /(.|\n)*/
"""

# Converts a name and the rule of its arguments to Lark.
_CallRule = Callable[[str, str, Literal], str]


def chat_form(
    request: ChatRequest, template: dict[str, Any] | None, parser: Any | None
) -> Form | None:
    """Return the form that a chat answer must have; None: any text.

    Args:
        request: The request.
        template: The model's response template (transformers'); None: it has none.
        parser: The parser that reads the answer by this template; None: the answer is plain text.
    """
    fields = template["fields"] if template is not None and parser is not None else {}
    forced, constraint = request.forced_tools, request.constraint
    if forced:
        return _calls_form(request, forced, fields, parser)
    if constraint is None:
        return None
    offered = request.tools if request.offered_tools is not None else None
    return _answer_form(constraint, [tool.function for tool in offered or ()], fields, parser)


def _answer_form(
    constraint: Constraint,
    tools: Sequence[FunctionTool],
    fields: dict[str, Any],
    parser: Any | None,
) -> Form:
    """Make the form of an answer that follows a constraint, or calls tools in the model's own format."""
    rule = _own_format(fields.get("tool_calls", {}), tools) if tools else None
    arguments = _arguments(tools) if rule is not None else []

    def source(literal: Literal) -> Source:
        start, rules = _reasoning(fields, parser, literal)
        opening = fields.get("content", {}).get("open")
        if isinstance(opening, str):
            start += f"({literal(opening)})? "
        if not start:
            return Source((constraint.part,))
        answer = f"@{constraint.part.name}"
        if rule is not None:
            rules += _call_rule(rule, tools, arguments, literal)
            answer = f"({answer} | call (WS? call)*)"
        return Source((_main(f"{start}{answer}", rules), constraint.part, *arguments))

    return Form(constraint.field, source)


def _calls_form(
    request: ChatRequest, tools: Sequence[FunctionTool], fields: dict[str, Any], parser: Any | None
) -> Form:
    names_tool = request.tool_choice != "required"
    several = not names_tool and request.parallel_tool_calls is not False
    own = _own_format(fields.get("tool_calls", {}), tools)
    arguments = _arguments(tools)

    def source(literal: Literal) -> Source:
        start, rules = _reasoning(fields, parser, literal)
        rules += _call_rule(own or _json_call, tools, arguments, literal)
        if own is not None:
            start += f"call{' (WS? call)*' if several else ''}"
        elif names_tool:
            start += f"@{arguments[0].name}"
        else:
            more = ' (", " call)*' if several else ""
            start += f'"[" call{more} "]"'
        return Source((_main(start, rules), *arguments))

    if own is not None:
        return Form("tools", source, names_tool=names_tool)
    name = tools[0].name if names_tool else None
    return Form("tools", source, lambda: JsonCalls(name), names_tool)


def _arguments(tools: Sequence[FunctionTool]) -> list[Part]:
    return [
        Part(f"arguments{index}", "json", json.dumps(_closed(tool.parameters), ensure_ascii=False))
        for index, tool in enumerate(tools)
    ]


def _closed(schema: Any) -> Any:
    """Return the schema of a function's arguments without further properties where it names some.

    A function has no parameters beside those named, but few clients say so in the schema. A schema that
    combines others stays as it is, because a property may be named elsewhere.
    """
    if not isinstance(schema, dict):
        return schema
    properties, required = schema.get("properties"), schema.get("required", [])
    if (
        isinstance(properties, dict)
        and schema.keys() <= _PLAIN_OBJECT
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    ):
        inner = {name: _closed(each) for name, each in properties.items()}
        return schema | {"properties": inner, "additionalProperties": False}
    if schema.keys() <= _PLAIN_LIST and "items" in schema:
        return schema | {"items": _closed(schema["items"])}
    return schema


def _call_rule(
    rule: _CallRule, tools: Sequence[FunctionTool], arguments: Sequence[Part], literal: Literal
) -> str:
    calls = (
        rule(tool.name, f"@{part.name}", literal)
        for tool, part in zip(tools, arguments, strict=True)
    )
    return f"call: {' | '.join(calls)}\n"


def _main(start: str, rules: str) -> Part:
    return Part("main", "lark", f"start: {start}\n{rules}{_TERMINALS}")


def _json_call(name: str, arguments: str, _literal: Literal) -> str:
    head = json.dumps(f'{{"name": {json.dumps(name)}, "parameters": ', ensure_ascii=False)
    return f'{head} {arguments} "}}"'


def _own_format(field: dict[str, Any], tools: Sequence[FunctionTool]) -> _CallRule | None:
    """Return the rule of a tool call in the model's format.

    None: the format is unknown, it is not JSON, or it cannot hold the name of one of the tools.
    """
    opening, closing = field.get("open"), field.get("close")
    pattern = re.escape(opening) if isinstance(opening, str) else field.get("open_pattern")
    plain = field.get("content") == "json" and not field.get("content_args")
    if not plain or not isinstance(closing, str) or not isinstance(pattern, str):
        return None
    parts = _NAME_GROUP.split(pattern.removeprefix(r"\s*"))
    texts = [re.sub(r"\\(\W)", r"\1", part) for part in parts]
    # The pattern must be plain text around the name.
    if not all(re.fullmatch(pattern, tool.name.join(texts)) for tool in tools):
        return None

    def call(name: str, content: str, literal: Literal) -> str:
        return f"{literal(name.join(texts))} WS? {content} WS? {literal(closing)}"

    def whole_call(name: str, arguments: str, literal: Literal) -> str:
        head = literal(f'{{"name": {json.dumps(name)}, "arguments": ')
        return call(name, f'{head} {arguments} "}}"', literal)

    transform = field.get("transform")
    if transform == _WHOLE_CALL and len(texts) == 1:
        return whole_call
    return call if transform == _NAMED_CALL and len(texts) == 2 else None


def _reasoning(fields: dict[str, Any], parser: Any | None, literal: Literal) -> tuple[str, str]:
    """Return the beginning of the start rule and the rules that it needs: the model may reason first.

    The prompt may have opened the reasoning, which the answer must then close, or closed it.
    """
    name = next((name for name in _REASONING if name in fields), "")
    field = fields.get(name, {})
    opening, closing = field.get("open"), field.get("close")
    if not isinstance(opening, str) or not isinstance(closing, str) or parser is None:
        return "", ""
    seen = [event["type"] for event in parser.initial_events if event.get("field") == name]
    if "region_close" in seen:
        return "WS? ", ""
    end = literal(closing)
    # A special token is no text. Other text ends the reasoning at its first match (lazy).
    is_special = end.startswith("<[") and " " not in end
    rule = f"thought{'' if is_special else '[lazy]'}: TEXT {end}\n"
    return ("thought WS? " if seen else f"({literal(opening)} thought)? WS? "), rule
