"""Histories over HTTP: what an agent sends back, with the templates of several families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attention_client.generation.sizes import EngineSizes
from chat_prompts import assistant, result, template
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
    with Box(kind, SIZES, chat_template=template(request.param)) as box:
        yield box


NAMED = {"type": "function", "function": TOOL["function"]}


@pytest.mark.parametrize(
    ("choice", "most"),
    [
        ("required", 100),
        (NAMED, 3),
        pytest.param("required", 3, marks=pytest.mark.nightly),
        pytest.param(NAMED, 100, marks=pytest.mark.nightly),
    ],
)
def test_a_forced_call_and_its_result_go_back(family: Box, choice: Any, most: int) -> None:
    """The limit of 3 tokens cuts the call, or its arguments, off."""
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat(family, USER, **fields, max_tokens=most).json()["choices"][0]["message"]
    results = [result("17", each["id"]) for each in answer.get("tool_calls") or []]
    assert results or most == 3
    chat(family, USER, answer, *results)
    assert (answer["content"] is None) == bool(results)
    if results:  # else two answers in a row, which some templates refuse
        chat(family, USER, answer, *results, assistant(content="Warm."), USER)


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_inside_messages_are_named(family: Box, stream: bool) -> None:
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    headers = chat(family, {"role": "user", "content": [part]}, stream=stream).headers
    assert headers["x-eaas-ignored-fields"] == "messages%5B0%5D.content%5B0%5D.cache_control"
    assert "x-eaas-ignored-fields" not in chat(family, USER, stream=stream).headers
