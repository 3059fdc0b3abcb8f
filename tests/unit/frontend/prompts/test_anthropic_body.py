"""Anthropic's bodies become chat requests: histories, tools, thinking, formats, refusals."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.generation.errors import ApiError
from frontend.prompts.anthropic_body import CountRequest, MessagesRequest

ASK: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "warmth", "description": "Of a town.", "input_schema": {"type": "object"}}


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


def chat(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The messages of the chat request, with calls in short and without what was not set."""
    request = MessagesRequest.read(ASK | {"messages": list(messages)} | fields)
    found = []
    for message in request.messages:
        fields = message.model_dump(exclude_unset=True)
        parts = fields["content"]
        if isinstance(parts, list):
            fields["content"] = [part["text"] for part in parts if part["type"] == "text"]
        if message.tool_calls:
            calls = [(each.id, each.function) for each in message.tool_calls]
            fields["calls"] = [(id, call.name, call.text) for id, call in calls]
        fields["thought"] = message.for_template().get("reasoning_content")
        found.append({name: fields[name] for name in NAMES if fields.get(name) is not None})
    return found


NAMES = ("role", "content", "thought", "calls", "tool_call_id")


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("be kind", ["be kind"]),
        ([text("be kind", **EPHEMERAL), text("be brief")], ["be kind", "be brief"]),
        ([text("x-anthropic-billing-header: cch=1;"), text("be kind")], ["be kind"]),
        *((nothing, None) for nothing in (None, "", [])),
    ],
)
def test_the_system_text_is_the_first_message(system: Any, content: Any) -> None:
    *first, asked = chat(*ASK["messages"], system=system)
    assert first == ([] if content is None else [{"role": "system", "content": content}])
    assert asked == {"role": "user", "content": ["hi"]}


def test_a_turn_with_tools() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "warmth", "input": {"town": "Łódź"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("17")], **EPHEMERAL}
    messages = chat(
        {"role": "user", "content": [text("a"), text("b", **EPHEMERAL)]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                text("I ask."),
                call,
                call | {"id": "toolu_2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [result, result | {"tool_use_id": "toolu_2", "content": "no"}, text("c")],
        },
        {"role": "user", "content": "d"},
        {"role": "system", "content": [text("e")]},
    )
    assert messages == [
        {"role": "user", "content": ["a", "b"]},
        {
            "role": "assistant",
            "content": ["I ask."],
            "thought": "Hm.",
            "calls": [
                ("toolu_1", "warmth", '{"town": "Łódź"}'),
                ("toolu_2", "warmth", "{}"),
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": ["17"]},
        {"role": "tool", "tool_call_id": "toolu_2", "content": ["no"]},
        {"role": "user", "content": ["c", "d", "e"]},
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_result_without_content(content: Any) -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    *_, message = chat(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    )
    assert message == {"role": "tool", "tool_call_id": "a", "content": []}


def test_a_last_message_of_the_assistant_is_continued() -> None:
    prefill = {"role": "assistant", "content": "The best is ("}
    request = MessagesRequest.read(ASK | {"messages": [*ASK["messages"], prefill]})
    assert request.continue_final_message
    assert not request.opens_answer
    assert MessagesRequest.read(ASK).opens_answer


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        (
            {"type": "tool", "name": "warmth", "disable_parallel_tool_use": False},
            {"type": "function", "function": {"name": "warmth"}},
            None,
        ),
    ],
)
def test_tools(choice: Any, expected: Any, parallel: bool | None) -> None:
    fields = {"tools": [TOOL | EPHEMERAL | {"type": "custom"}], "tool_choice": choice}
    request = MessagesRequest.read(ASK | fields)
    assert request.tool_choice == expected
    assert request.parallel_tool_calls is parallel
    counted = CountRequest.read({"messages": ASK["messages"]} | fields)
    if expected == "none":
        assert request.offered_tools is counted.offered_tools is None
        return
    assert counted.offered_tools
    (tool,) = request.tools or ()
    assert tool.function.model_dump() == {
        "name": "warmth",
        "description": "Of a town.",
        "parameters": {"type": "object"},
    }


@pytest.mark.parametrize(
    ("thinking", "switch", "shown"),
    [
        (None, None, True),
        ({"type": "adaptive"}, True, True),
        ({"type": "enabled", "budget_tokens": 1024}, True, True),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, True, False),
        ({"type": "disabled"}, False, False),
    ],
)
def test_thinking(thinking: Any, switch: bool | None, shown: bool) -> None:
    request = MessagesRequest.read(ASK | {"thinking": thinking})
    kwargs = request.chat_template_kwargs or {}
    assert kwargs.get("enable_thinking") is switch
    assert kwargs.get("thinking") is switch
    assert (request.include_reasoning is not False) is shown


def test_what_claude_code_sends_is_accepted() -> None:
    request = MessagesRequest.read(
        ASK
        | {
            "metadata": {"user_id": "user_1"},
            "betas": ["context-1m"],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "max"},
            "stop_sequences": ["END"],
            "temperature": 1,
            "odd": 1,
        }
    )
    assert request.ignored == ("odd",)
    assert request.reasoning_effort == "high"
    assert request.stop == ["END"]
    assert request.max_tokens == 9


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_structured_output(name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    request = MessagesRequest.read(
        ASK | {name: {"format": form} if name == "output_config" else form}
    )
    assert request.constraint is not None
    assert json.loads(request.constraint.part.text) == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (said({}), "messages[0].content[0].type"),
        (said({"type": "image"}), "messages[0].content"),
        (said({"type": "text"}), "messages[0].content"),
        (
            said({"type": "tool_result", "content": [{"a": 1}]}),
            "messages[0].content[0].content[0].type",
        ),
        ({"system": [{"type": "image"}]}, "system"),
        ({"system": 1}, "system"),
        ({"tools": [{"name": "web_search", "type": "web_search_20260209"}]}, "tools[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"temperature": 3.0}, "temperature"),
        ({"output_format": {"type": "json_schema", "schema": 1}}, "output_config.format.schema"),
    ],
)
def test_wrong_bodies_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        MessagesRequest.read(ASK | fields)
    assert caught.value.status == 400
    assert caught.value.param == param


NAMED = ("type", "role", "content", "text", "thinking", "source", "data", "id", "name", "input",
         "tool_use_id", "is_error")  # fmt: skip
KINDS = ("text", "thinking", "tool_use", "tool_result", "document", "user", "assistant", "system")
ODD = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3), st.sampled_from(KINDS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMED), inner, max_size=5)
    ),
    max_leaves=6,
)


@given(blocks=st.lists(st.dictionaries(st.sampled_from(NAMED), ODD), max_size=3), odd=ODD)
def test_odd_bodies_are_read_or_refused(blocks: list[Any], odd: Any) -> None:
    for role in ("user", "assistant"):
        body = {"messages": [{"role": role, "content": blocks}], "system": odd, "max_tokens": 1}
        with suppress(ApiError):
            assert MessagesRequest.read(body).messages
