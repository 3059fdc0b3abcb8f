"""/v1/messages and its count_tokens: whole and streamed, tools, stops, limits, errors, Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from eaas.errors import ExpertsUnavailableError
from eaas.net.api_keys import ApiKeys
from http_box import Box

pytestmark = pytest.mark.integration

ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
}
# A random model ends it soon.
TOOL: dict[str, Any] = {
    "name": "warmth",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"enum": ["Oslo", "Łódź"]}},
        "required": ["town"],
    },
}
FORCED = ASK | {"max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any"}}


def post(box: Box, body: dict[str, Any], path: str = "", **headers: str) -> httpx.Response:
    return box.http.post(f"/v1/messages{path}", json=body, headers=headers)


def answer(box: Box, body: dict[str, Any]) -> dict[str, Any]:
    response = post(box, body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def stream(box: Box, body: dict[str, Any]) -> list[dict[str, Any]]:
    blocks = post(box, body | {"stream": True}).text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def chat(box: Box, **fields: Any) -> dict[str, Any]:
    body = {"messages": ASK["messages"], "temperature": 0, "max_tokens": 9} | fields
    return dict(box.http.post("/v1/chat/completions", json=body).json())


def test_the_text_is_the_chats(box: Box) -> None:
    message, expected = answer(box, ASK), chat(box)
    (block,) = message["content"]
    assert block == {"type": "text", "text": expected["choices"][0]["message"]["content"]}
    assert (message["role"], message["model"]) == ("assistant", "tiny")
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert message["usage"]["output_tokens"] == 9
    found = stream(box, ASK)
    deltas = [each["delta"]["text"] for each in found if each["type"] == "content_block_delta"]
    assert "".join(deltas) == block["text"]
    assert found[-2]["usage"] == message["usage"]


def test_a_stop_sequence(box: Box) -> None:
    text = chat(box)["choices"][0]["message"]["content"]
    stop = text[3:5]
    body = ASK | {"stop_sequences": ["never in it", stop]}
    message = answer(box, body)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]
    assert stream(box, body)[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": stop,
    }


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "warmth"}],
)
def test_tools(box: Box, choice: dict[str, Any]) -> None:
    body = FORCED | {"tool_choice": choice}
    message = answer(box, body)
    assert message["stop_reason"] == "tool_use"
    (block,) = message["content"]
    assert (block["type"], block["name"]) == ("tool_use", "warmth")
    assert block["input"]["town"] in ("Oslo", "Łódź")
    found = stream(box, body)
    kinds = [each["type"] for each in found]
    assert kinds[2:5] == ["content_block_start", "content_block_delta", "content_block_stop"]
    assert json.loads(found[3]["delta"]["partial_json"]) == block["input"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "17"}
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    assert answer(box, ASK | {"messages": history})["content"]


def test_a_call_that_is_cut_off(box: Box) -> None:
    message = answer(
        box, FORCED | {"max_tokens": 14, "tool_choice": {"type": "tool", "name": "warmth"}}
    )
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["type"] == "tool_use"
    assert isinstance(message["content"][0]["input"], dict)


def test_the_room_limits_the_answer(box: Box) -> None:
    """Anthropic's clients ask for tens of thousands of tokens."""
    message = answer(box, ASK | {"max_tokens": 64_000})
    if message["stop_reason"] != "end_turn":
        assert message["stop_reason"] == "model_context_window_exceeded"
    none = answer(box, ASK | {"max_tokens": 0})
    assert (none["content"], none["stop_reason"]) == ([], "max_tokens")


def test_a_message_to_continue(box: Box) -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "The best is ("}]
    whole = chat(box, messages=messages, continue_final_message=True)
    (block,) = answer(box, ASK | {"messages": messages})["content"]
    assert block["text"] == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("size", [1, 3000, 70_000])
def test_every_reader_of_bodies(box: Box, size: int) -> None:
    body = ASK | {"metadata": {"user_id": "b" * size}, "odd": 1, "betas": ["x"]}
    response = post(box, body, "?beta=true")
    assert response.status_code == 200
    assert response.headers["x-eaas-ignored-fields"] == "odd"
    del body["max_tokens"]
    counted = post(box, body, "/count_tokens?beta=true")
    assert counted.json() == {"input_tokens": response.json()["usage"]["input_tokens"]}


def test_counted_tokens_are_those_of_the_prompt(box: Box) -> None:
    body = ASK | {
        "system": "be kind",
        "messages": [*ASK["messages"], {"role": "user", "content": "b"}],
    }
    counted = post(box, body, "/count_tokens").json()["input_tokens"]
    assert counted == answer(box, body)["usage"]["input_tokens"]
    none = FORCED | {"tool_choice": {"type": "none"}}
    assert post(box, none, "/count_tokens").json() == post(box, ASK, "/count_tokens").json()


def error(response: httpx.Response, status: int) -> tuple[str, str]:
    body = response.json()
    assert (response.status_code, body["type"]) == (status, "error")
    assert set(body["error"]) == {"type", "message"}
    return body["error"]["type"], body["error"]["message"]


def test_errors_have_anthropics_form(box: Box) -> None:
    for path in ("", "/count_tokens"):
        assert error(post(box, {}, path), 400)[0] == "invalid_request_error"
        assert error(post(box, ASK | {"model": "claude"}, path), 404)[0] == "not_found_error"
        wrong = box.http.post(f"/v1/messages{path}", content=b"{")
        assert error(wrong, 415)[0] == "invalid_request_error"
        huge = post(box, ASK | {"system": "a" * 200_000}, path)
        assert error(huge, 413)[0] == "request_too_large"
    kind, message = error(post(box, ASK | {"system": "a" * 600}), 400)
    assert kind == "invalid_request_error"
    assert message.startswith("prompt is too long")
    assert error(box.http.get("/v1/messages"), 405)[0] == "invalid_request_error"


def test_a_failure(box: Box) -> None:
    box.error = ExpertsUnavailableError(1, [3], "gone")
    kind, message = error(post(box, ASK), 503)
    assert kind == "overloaded_error"
    last = stream(box, ASK)[-1]
    assert last == {"type": "error", "error": {"type": kind, "message": message}}


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.setenv("EAAS_API_KEY", "secret")
    with Box(keys=ApiKeys(None)) as box:
        yield box


def test_keys(locked: Box) -> None:
    bearer, wrong = "Bearer secret", "Bearer x"
    for headers, status in (
        ({}, 401),
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "odd"}, 401),
        ({"authorization": bearer}, 200),
        ({"authorization": bearer, "x-api-key": "odd"}, 200),
        ({"authorization": wrong, "x-api-key": "secret"}, 200),
        ({"authorization": wrong, "x-api-key": "odd"}, 401),
    ):
        response = post(locked, ASK, **headers)
        assert response.status_code == status
        if status == 401:
            assert error(response, 401)[0] == "authentication_error"
        models = locked.http.get("/v1/models", headers=headers)
        assert models.status_code == status
    two = [("x-api-key", "secret"), ("x-api-key", "odd")]
    assert locked.http.post("/v1/messages", json=ASK, headers=two).status_code == 401
    assert locked.http.get("/eaas/v1/status", headers={"x-api-key": "secret"}).status_code == 200


# Anthropic's own client, if it is there: pip install anthropic
