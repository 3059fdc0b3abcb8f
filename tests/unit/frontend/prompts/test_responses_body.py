"""Bodies of /v1/responses become chat requests: items, tools, reasoning."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.generation.errors import ApiError
from frontend.prompts.responses_body import ResponsesRequest, call_item, sealed

FUNCTION = {
    "type": "function",
    "name": "warmth",
    "description": "Of a town.",
    "strict": False,
    "parameters": {"type": "object"},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
}
WORDS = ("message", "reasoning", "function_call", "custom_tool_call", "function_call_output",
         "function", "custom", "namespace", "allowed_tools", "grammar", "user", "assistant", "f")  # fmt: skip
NAMES = ("type", "role", "content", "summary", "encrypted_content", "call_id", "name", "namespace",
         "arguments", "input", "output", "tools", "format", "parameters", "mode", "text")  # fmt: skip
ODD = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3), st.sampled_from(WORDS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=6,
)
SPACE = {"type": "namespace", "name": "mcp", "description": "x", "tools": [FUNCTION]}


def read(given: Any = "hi", **fields: Any) -> ResponsesRequest:
    return ResponsesRequest.read({"input": given, **fields})


def chat(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    found = []
    for message in read(list(items), **fields).messages:
        content = message.content
        if isinstance(content, list):
            content = [part.text for part in content if part.type != "reasoning"]
        called = [each.function for each in message.tool_calls or ()]
        calls = [(call.name, call.text) for call in called]
        more = {"calls": calls, "thought": message.for_template().get("reasoning_content")}
        given = {name: each for name, each in more.items() if each}
        found.append({"role": message.role, "content": content} | given)
    return found


def test_a_loop_of_calls() -> None:
    messages = chat(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed("Hm.")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"type": "function_call", "call_id": "1", "name": "warmth", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "é\n"},
        {"type": "function_call_output", "call_id": "1", "output": "17"},
        {
            "type": "custom_tool_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "done"}],
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "3", "output": "18"},
        instructions="a",
    )
    assert messages == [
        {"role": "system", "content": ["a", "b"]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": ["d"],
            "thought": "Hm.",
            "calls": [("warmth", "{}"), ("apply_patch", '{"input": "é\\n"}')],
        },
        {"role": "tool", "content": "17"},
        {"role": "tool", "content": ["done"]},
        {"role": "assistant", "content": [], "thought": "Well.", "calls": [("n__f", "{}")]},
        {"role": "tool", "content": "18"},
    ]


def test_tools_become_functions_and_calls_become_items() -> None:
    tools = [FUNCTION, PATCH, SPACE, {"type": "web_search", "external_web_access": False}]
    request = read(tools=tools, tool_choice="auto", parallel_tool_calls=False)
    first, patch, spaced = [tool.function.model_dump() for tool in request.tools or ()]
    assert first == {name: FUNCTION[name] for name in FUNCTION if name != "type"}
    assert patch["parameters"]["required"] == ["input"]
    assert 'start: "a"' in patch["description"]
    assert spaced["name"] == "mcp__warmth"
    assert request.parallel_tool_calls is False
    assert request.ignored == ("tools.web_search",)
    assert request.repeated["tools"] == tools
    assert [call_item(each["name"], tools) for each in (first, patch, spaced, {"name": "odd"})] == [
        {"type": "function_call", "name": "warmth"},
        {"type": "custom_tool_call", "name": "apply_patch"},
        {"type": "function_call", "name": "warmth", "namespace": "mcp"},
        {"type": "function_call", "name": "odd"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected", "offered"),
    [
        ("none", "none", 2),
        ({"type": "function", "name": "warmth"}, "warmth", 2),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch", 2),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"name": "warmth"}]},
            "required",
            1,
        ),
    ],
)
def test_tool_choice(choice: Any, expected: str, offered: int) -> None:
    request = read(tools=[FUNCTION, PATCH], tool_choice=choice)
    found = request.tool_choice
    assert (found["function"]["name"] if isinstance(found, dict) else found) == expected
    assert len(request.tools or ()) == offered


def test_reasoning_and_options() -> None:
    request = read(
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        store=False,
        truncation="auto",
        prompt_cache_key="x",
        text={"verbosity": "low"},
        client_metadata={"a": "b"},
    )
    assert request.reasoning_effort == "low"
    assert request.seals
    assert request.repeated["truncation"] == "auto"
    assert not request.repeated["store"]
    assert request.ignored == ("client_metadata",)
    assert read().repeated["truncation"] == "disabled"
    assert read().repeated["store"]


@pytest.mark.parametrize("seal", ["x", "gAAAAAB_", "//8="])
def test_another_servers_reasoning_is_left_out(seal: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": seal}
    assert chat(item, {"role": "user", "content": "a"}) == [
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "a"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [FUNCTION, {"type": "mcp"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [FUNCTION]}, "tool_choice"),
        ({"truncation": "odd"}, "truncation"),
        ({"previous_response_id": 1}, "previous_response_id"),
    ],
)
def test_wrong_bodies_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


@given(items=st.lists(st.dictionaries(st.sampled_from(NAMES), ODD), max_size=3), odd=ODD)
def test_odd_bodies_are_read_or_refused(items: list[Any], odd: Any) -> None:
    for fields in ({"given": items}, {"tools": items, "tool_choice": odd}):
        with suppress(ApiError):
            assert read(**fields).messages
