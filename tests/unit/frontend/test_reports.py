"""Answers in the forms of Anthropic's and OpenAI's newer API: a stream's events make the whole object."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.families.reader import Call, Reasoning
from frontend.prompts.anthropic_body import MessagesRequest
from frontend.prompts.responses_body import ResponsesRequest
from frontend.requests.generation import Finish, Served
from frontend.requests.messages import MessagesReport
from frontend.requests.report import Report, read_arguments
from frontend.requests.responses import ResponsesReport

TOOLS = [{"type": "function", "name": "f"}, {"type": "custom", "name": "p"}]
COUNTS = {
    "prompt_tokens": 3,
    "completion_tokens": 9,
    "total_tokens": 12,
    "completion_tokens_details": {"reasoning_tokens": 2},
}
ANSWER: Any = SimpleNamespace(id="x-1", created=0, usage=lambda: COUNTS)

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
values = st.one_of(texts, st.integers(-9, 9), st.none(), st.lists(texts, max_size=2))
arguments = st.dictionaries(texts, values, max_size=3).map(json.dumps)
inputs = texts.map(lambda text: json.dumps({"input": text}))
pieces = st.lists(
    st.one_of(
        texts,
        texts.map(Reasoning),
        st.builds(Call, st.just(0), st.just("f"), arguments),
        st.builds(Call, st.just(0), st.just("p"), inputs),
        st.just(Served({})),
    ),
    max_size=9,
)
finishes = st.builds(
    Finish, st.sampled_from(["stop", "length", "tool_calls"]), st.sampled_from([None, "END"])
)


def messages_report(**fields: Any) -> MessagesReport:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]} | fields
    return MessagesReport(MessagesRequest.read(body), ANSWER, "tiny")


def responses_report(**fields: Any) -> ResponsesReport:
    request = ResponsesRequest.read({"input": "hi", "tools": TOOLS} | fields)
    return ResponsesReport(request, ANSWER, "tiny")


def events(report: Report, given: list[Any]) -> list[dict[str, Any]]:
    """The events as they are when they are sent: the object changes later."""
    found = json.loads(json.dumps(list(report.begin())))
    for piece in given:
        found += json.loads(json.dumps(list(report.add(piece))))
    return list(found)


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client of Anthropic's makes of the events."""
    message: dict[str, Any] = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                block["json"] += delta["partial_json"]
            else:
                block[name] += delta[name]
        elif event["type"] == "content_block_stop":
            block = message["content"][-1]
            assert event["index"] == len(message["content"]) - 1
            given = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(given)
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def text_of(given: list[Any], kind: type) -> str:
    return "".join(piece for piece in given if type(piece) is kind)


@given(given=pieces, finish=finishes)
def test_messages(given: list[Any], finish: Finish) -> None:
    report = messages_report()
    found = events(report, [*given, finish])
    assert accumulated(found) == report.whole
    blocks = report.whole["content"]
    for kind, name in ((str, "text"), (Reasoning, "thinking")):
        text = "".join(block[name] for block in blocks if block["type"] == name)
        assert text == text_of(given, kind)
    assert all(block["signature"] for block in blocks if block["type"] == "thinking")
    calls = [piece for piece in given if isinstance(piece, Call)]
    used = [block for block in blocks if block["type"] == "tool_use"]
    assert [block["id"] for block in used] == [call.id for call in calls]
    assert [block["input"] for block in used] == [json.loads(call.arguments) for call in calls]
    reason = {"length": "max_tokens"}.get(finish.reason)
    stopped = "stop_sequence" if finish.stop else "end_turn"
    assert report.whole["stop_reason"] == (reason or ("tool_use" if calls else stopped))
    assert report.whole["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]


@given(given=pieces, finish=finishes)
def test_responses(given: list[Any], finish: Finish) -> None:
    report = responses_report()
    found = events(report, [*given, finish])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["response"] == report.whole
    output: list[dict[str, Any]] = []
    for event in found:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
        elif kind.endswith(".delta"):
            assert event["item_id"] == output[-1]["id"]
            output[-1]["sum"] = output[-1].get("sum", "") + event["delta"]
        elif kind == "output_item.done":
            last = output.pop()
            item = event["item"]
            text = item.get("arguments", item.get("input"))
            assert last.get("sum", "") == (item["content"][0]["text"] if text is None else text)
            assert last["id"] == item["id"]
            output.append(item)
    assert output == report.whole["output"]
    for kind, name in ((str, "message"), (Reasoning, "reasoning")):
        items = [item for item in output if item["type"] == name]
        assert "".join(item["content"][0]["text"] for item in items) == text_of(given, kind)
    calls = [piece for piece in given if isinstance(piece, Call)]
    used = [item for item in output if "call_id" in item]
    assert [item["call_id"] for item in used] == [call.id for call in calls]
    for item, call in zip(used, calls, strict=True):
        assert item["type"] == {"f": "function_call", "p": "custom_tool_call"}[call.name]
        if call.name == "p":
            assert item["input"] == json.loads(call.arguments)["input"]
        else:
            assert item["arguments"] == call.arguments
    is_cut = finish.reason == "length"
    assert report.whole["status"] == ("incomplete" if is_cut else "completed")


def test_an_answer_that_ends_with_the_context() -> None:
    report = messages_report(max_tokens=1000)
    events(report, ["a", Finish("length")])
    assert report.whole["stop_reason"] == "model_context_window_exceeded"


def test_reasoning_comes_back_sealed() -> None:
    report = responses_report(include=["reasoning.encrypted_content"])
    events(report, [Reasoning("Hm."), Call(0, "f", "{}"), Finish("tool_calls")])
    item, call = report.whole["output"]
    back = [{"role": "user", "content": "a"}, {"type": "reasoning", **item, "content": None}, call]
    *_, message = ResponsesRequest.read({"input": back}).messages
    assert message.tool_calls is not None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": "tex', {"a": "tex"}),
        ("[1]", {"arguments": "[1]"}),
        ("odd", {"arguments": "odd"}),
    ],
)
def test_arguments_that_were_cut_off(text: str, found: dict[str, Any]) -> None:
    assert read_arguments(text) == found
