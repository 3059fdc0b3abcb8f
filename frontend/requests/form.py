"""The form that an answer must have, as a grammar, and how such an answer is read.

A chat answer is text in a given form, or tool calls, after the thought that the prompt opened. Tool calls
have the model's own format where that holds JSON, so that the model writes what it was trained on. For other
models the whole answer is JSON, as in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as data_field
from typing import Any

from frontend.families.family import BARE, JSON_LIST, CallFormat
from frontend.families.markup import NO_MARKUP, Markup
from frontend.families.reader import AnswerReader, Calls
from frontend.grammars import Part, Source
from frontend.grammars.compiler import Literal
from frontend.prompts.bodies import ChatRequest
from frontend.prompts.constraint import Constraint
from frontend.prompts.messages import FunctionTool

__all__ = ["Form", "chat_form"]

_NOTES = {"$schema", "$defs", "definitions", "title", "description", "default", "examples"}
_PLAIN_OBJECT = _NOTES | {"type", "properties", "required"}
_PLAIN_LIST = _NOTES | {"type", "items", "minItems", "maxItems"}
_MOST_CALLS = 16  # a weak model would go on until its tokens are used up
_TERMINALS = r"""WS: /[ \n]{1,8}/
TEXT: /(.|\n)*/
NUMBER: /[0-9]{1,3}/
"""


@dataclass(frozen=True)
class Form:
    """The form that an answer must have.

    Attributes:
        field: The field of the request that asks for it, for errors.
        source: Builds the grammar; None: any text.
        markup: The markup of the answer.
        reading: Further arguments of `AnswerReader` for such an answer.
        names_tool: Whether the request names the function that the answer calls; then, as in OpenAI's API,
            the answer ends with the reason "stop".
        shows_reasoning: Whether the choice has the model's reasoning.
    """

    field: str = ""
    source: Callable[[Literal], Source] | None = None
    markup: Markup = NO_MARKUP
    reading: dict[str, Any] = data_field(default_factory=dict)
    names_tool: bool = False
    shows_reasoning: bool = True

    @classmethod
    def of(cls, constraint: Constraint | None) -> Form:
        """Make the form of an answer that follows a constraint from its first to its last token."""
        if constraint is None:
            return cls()
        return cls(constraint.field, lambda _literal: (constraint.part,))

    def reader(self) -> AnswerReader:
        """Return a new reader of one answer."""
        return AnswerReader(self.markup, **self.reading)


def chat_form(request: ChatRequest, markup: Markup) -> Form:
    """Return the form that a chat answer must have.

    Args:
        request: The request, whose prompt has been read.
        markup: The markup of the model's answers.
    """
    constraint, form = request.constraint, Form()
    if constraint is not None and constraint.is_raw and not request.forced_tools:
        form = Form.of(constraint)
    elif constraint is not None or request.forced_tools:
        form = _guided_form(request, markup)
    tools = request.tools if request.offered_tools is not None else None
    reading: dict[str, Any] = {
        "opening": request.opening,
        "continues": bool(request.continue_final_message),
        "calls": Calls.ANYWHERE if tools else Calls.NEVER,
        "tools": {tool.function.name: tool.function.parameters for tool in tools or ()},
        "one_call": request.parallel_tool_calls is False,
        "earlier": request.found.get("earlier_calls", 0),
    }
    return replace(
        form,
        markup=markup,
        reading=reading | form.reading,
        names_tool=request.names_tool,
        shows_reasoning=request.include_reasoning is not False,
    )


def _guided_form(request: ChatRequest, markup: Markup) -> Form:
    """Make the form of an answer that calls tools, or follows a constraint, or does either."""
    family, constraint, tools = markup.family, request.constraint, request.forced_tools
    form = None if family is None else family.call
    reading: dict[str, Any]
    if tools:
        constraint, form = None, form or (BARE if request.names_tool else JSON_LIST)
        reading = {"forced": form, "tools": {tool.name: tool.parameters for tool in tools}}
    else:
        tools = [tool.function for tool in request.tools or () if form and request.offered_tools]
        # The text has no markup, except calls in place of the text.
        reading = {"calls": Calls.INSTEAD if tools else Calls.NEVER, "is_content": not tools}
    one_call = constraint is None and (request.names_tool or request.parallel_tool_calls is False)
    arguments = [
        Part(f"arguments{index}", "json", json.dumps(_closed(tool.parameters), ensure_ascii=False))
        for index, tool in enumerate(tools)
    ]

    def source(literal: Literal) -> Source:
        start, rules = _thought(request, markup, literal)
        ways: list[str] = []
        parts = [] if constraint is None else [constraint.part]
        if constraint is not None:
            content = family.content if family is not None else ""
            ways = [f"{literal(content) if content else ''} @{constraint.part.name}"]
            if not (start or content or tools):
                return (constraint.part,)
        if form is not None and tools:
            calls, more = _calls(form, tools, arguments, literal, several=not one_call)
            ways, rules = [*ways, calls], rules + more
        answer = ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"
        main = Part("main", "lark", f"start: {start}{answer}\n{rules}{_TERMINALS}")
        return (main, *parts, *arguments)

    return Form("tools" if constraint is None else constraint.field, source, reading=reading)


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


def _calls(
    form: CallFormat,
    tools: Sequence[FunctionTool],
    arguments: Sequence[Part],
    literal: Literal,
    *,
    several: bool,
) -> tuple[str, str]:
    """Return calls in a format, to put into a rule, and the rule that they need."""
    calls = []
    for tool, part in zip(tools, arguments, strict=True):
        head = " NUMBER ".join(literal(text) for text in form.head(tool.name) if text)
        calls.append(f"{head} @{part.name} {literal(form.tail)}")
    more = f" ({literal(form.separator)} call){{0,{_MOST_CALLS - 1}}}" if several else ""
    return f"{literal(form.start)} call{more} {literal(form.end)}", f"call: {' | '.join(calls)}\n"


def _thought(request: ChatRequest, markup: Markup, literal: Literal) -> tuple[str, str]:
    """Return the beginning of the start rule and the rule that it needs, if the prompt opened a thought."""
    if not markup.closing or not markup.thought(request.opening):
        return "", ""
    end = literal(markup.closing)
    # A token is no text. Other text ends the thought at its first match (lazy).
    is_token = end.startswith("<[") and " " not in end
    return "thought WS? ", f"thought{'' if is_token else '[lazy]'}: TEXT {end}\n"
