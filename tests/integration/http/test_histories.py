"""Histories over HTTP: what an agent sends back, with the templates of several families."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from attention_client.generation.sizes import EngineSizes
from chat_prompts import assistant, call, result, template
from http_box import Box

pytestmark = pytest.mark.integration

SIZES = EngineSizes(num_blocks=128, page_size=8, max_batch_tokens=64)
USER = {"role": "user", "content": "How warm is it in Quito?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "warmth",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Quito", "Lima"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
EFFORT = (
    "{% if reasoning_effort == 'high' %}think long and hard {% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def chat(box: Box, *messages: Any, **fields: Any) -> Any:
    body = {"messages": messages, "max_tokens": 4} | fields
    response = box.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


@pytest.fixture(
    scope="module",
    params=["deepseek_v31", "gpt_oss", "kimi_k2", "mistral", "mixtral", "olmo3", "qwen3_coder"],
)
def family(request: pytest.FixtureRequest) -> Iterator[Box]:
    kind = "gpt_oss" if request.param == "gpt_oss" else "qwen3_moe"
    with closing(Box(kind, SIZES, chat_template=template(request.param))) as box:
        yield box


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": TOOL["function"]}])
@pytest.mark.parametrize("most", [100, 3])
def test_a_forced_call_and_its_result_go_back(family: Box, choice: Any, most: int) -> None:
    """The limit of 3 tokens cuts the call, or its arguments, off."""
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat(family, USER, **fields, max_tokens=most).json()["choices"][0]["message"]
    results = [result("17", each["id"]) for each in answer.get("tool_calls") or []]
    assert results or most == 3
    chat(family, USER, answer, *results)
    if results:  # else two answers in a row, which some templates refuse
        chat(family, USER, answer, *results, assistant(content="Warm."), USER)


def shown(box: Box, messages: Any, **fields: Any) -> str:
    """Return the prompt that the endpoint makes of messages."""
    tokens = box.http.post("/tokenize", json={"messages": messages} | fields).json()["tokens"]
    usage = chat(box, *messages, **fields | {"max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    return str(box.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


LIMA = '{"town": "Lima"}'
PARTS = [{"type": "text", "text": "I look."}, {"type": "text", "text": "Now."}]
HISTORIES: dict[str, tuple[list[Any], list[str]]] = {
    "empty list of calls": ([assistant(content="Warm.", tool_calls=[]), USER], ["Warm."]),
    "no calls": ([assistant(content="Warm.", tool_calls=None), USER], ["Warm."]),
    "call without text": ([assistant(call("now", LIMA)), result("17")], ["now", "Lima", "17"]),
    "parts beside a call": (
        [assistant(call("now", LIMA), content=PARTS), result("17")],
        ["I look.", "Now.", "Lima"],
    ),
    "empty arguments": ([assistant(call("now", "")), result("17")], ["now", "17"]),
    "arguments of null": ([assistant(call("now", None)), result("17")], ["now", "17"]),
    "arguments as an object": (
        [assistant(call("now", {"town": "Lima"})), result("17")],
        ["now", "Lima"],
    ),
    "arguments cut off": (
        [assistant(call("now", '{"town": "Lim'), content="I look."), result("no JSON"), USER],
        ["I look.", "now", "Lim", "no JSON"],
    ),
    "arguments in a list": ([assistant(call("now", '["Lim"]')), result("17")], ["now", "Lim"]),
    "a long id": ([assistant(call("now", LIMA, "a" * 50)), result("17", "a" * 50)], ["17"]),
    "Anthropic's id": ([assistant(call("now", LIMA, "toolu_1")), result("17", "toolu_1")], ["17"]),
    "no id": ([assistant(call("now", LIMA, None)), result("17", None)], ["17"]),
    "text parts": (
        [assistant(content="Hm."), {"role": "user", "content": PARTS}],
        ["I look.\nNow."],
    ),
    "parts of other types": (
        [assistant(content="Hm."), {"role": "user", "content": [PARTS[0], "b"]}],
        ["I look.\nb"],
    ),
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_all_of_a_history_is_in_the_prompt(
    family: Box, history: tuple[list[Any], list[str]]
) -> None:
    messages, texts = history
    prompt = shown(family, [USER, *messages])
    assert [each for each in texts if each not in prompt] == []


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_tool_without_parameters(family: Box, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "now"} | parameters}
    chat(family, USER, tools=[tool], tool_choice="required")


@pytest.fixture(scope="module")
def fields() -> Iterator[Box]:
    with closing(Box(sizes=SIZES, chat_template=template("fields"))) as box:
        yield box


@pytest.mark.parametrize(
    "thought",
    [
        {"content": "", "reasoning_content": "So."},
        {"content": "", "reasoning": "So."},
        {"content": [{"type": "thinking", "thinking": "So."}]},
    ],
)
def test_thoughts_and_names_are_in_the_prompt(fields: Box, thought: dict[str, Any]) -> None:
    messages = [USER | {"name": "Ana"}, assistant(call("now", "{}"), **thought)]
    prompt = shown(fields, [*messages, result("17", name="now")])
    assert prompt.startswith("[user name=Ana] How")
    assert prompt.endswith("(thought: So.)  call now {} ; [tool name=now] 17 ; [assistant] ")


@pytest.fixture(scope="module")
def efforts() -> Iterator[Box]:
    with closing(Box("gpt_oss", SIZES, chat_template=EFFORT)) as box:
        yield box


@pytest.mark.parametrize(
    ("path", "effort"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "high"}),
        ("/v1/chat/completions", {"chat_template_kwargs": {"reasoning_effort": "high"}}),
        ("/v1/messages", {"output_config": {"effort": "high"}}),
    ],
)
def test_the_effort_changes_the_prompt(efforts: Box, path: str, effort: dict[str, Any]) -> None:
    counts = []
    for each in (effort, {}):
        body = {"model": "tiny", "messages": [USER], "max_tokens": 2} | each
        usage = efforts.http.post(path, json=body).json()["usage"]
        counts.append(usage.get("prompt_tokens") or usage["input_tokens"])
    assert counts[0] - counts[1] == len("think long and hard ")


def test_ignored_fields_inside_messages_are_named(family: Box) -> None:
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    response = chat(family, {"role": "user", "content": [part]})
    assert (
        response.headers["x-eaas-ignored-fields"] == "messages%5B0%5D.content%5B0%5D.cache_control"
    )
