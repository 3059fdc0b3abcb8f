"""/v1/responses: OpenAI's client, whole and streamed, structured, refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from eaas.errors import ExpertsUnavailableError
from http_box import Box, error_of

pytestmark = pytest.mark.integration

ASK: Any = {"model": "tiny", "input": "hi", "temperature": 0, "max_output_tokens": 9}


class Point(pydantic.BaseModel):
    x: int = pydantic.Field(ge=0, le=9)
    y: int = pydantic.Field(ge=0, le=9)


def chat_text(box: Box, messages: list[Any]) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 9}
    answer = box.http.post("/v1/chat/completions", json=body).json()
    return str(answer["choices"][0]["message"]["content"])


def test_whole_and_streamed_answers_are_equal(box: Box) -> None:
    whole = box.openai.responses.create(**ASK)
    assert whole.output_text == chat_text(box, [{"role": "user", "content": "hi"}])
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(box.openai.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage


def test_an_answer_that_is_cut_off_is_incomplete(box: Box) -> None:
    cut = box.openai.responses.create(**ASK | {"max_output_tokens": 2})
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        (
            {"instructions": "be kind"},
            [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        ),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "reasoning", "id": "rs_1", "summary": []},
                    {
                        "type": "message",
                        "id": "msg_1",
                        "role": "assistant",
                        "status": "completed",
                        "content": [{"type": "output_text", "text": "b", "annotations": []}],
                    },
                    {"role": "user", "content": "c"},
                ]
            },
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ],
        ),
    ],
)
def test_input_becomes_messages(box: Box, fields: dict[str, Any], messages: list[Any]) -> None:
    assert box.openai.responses.create(**ASK | fields).output_text == chat_text(box, messages)


def test_openai_parse(box: Box) -> None:
    asked = ASK | {"temperature": 1.0, "max_output_tokens": 150}
    answer = box.openai.responses.parse(**asked, text_format=Point)
    assert answer.status == "completed"
    assert answer.output_parsed is not None
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    with box.openai.responses.stream(**asked, text_format=Point) as stream:
        assert stream.get_final_response().output_parsed is not None


@pytest.mark.parametrize("size", [1, 3000, 70_000])
def test_every_reader_of_bodies(box: Box, size: int) -> None:
    body = ASK | {"metadata": {"a": "b" * size}, "odd": 1}
    response = box.http.post("/v1/responses", json=body)
    assert response.status_code == 200
    assert response.headers["x-eaas-ignored-fields"] == "odd"
    assert response.json()["object"] == "response"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input"),
        ({"input": None}, "input"),
        ({"input": "a" * 200}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3.0}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "file_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format.schema",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ],
)
def test_wrong_bodies_are_refused(box: Box, fields: dict[str, Any], param: str) -> None:
    response = box.http.post("/v1/responses", json=ASK | fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


def test_a_failure_ends_the_stream(box: Box) -> None:
    box.error = ExpertsUnavailableError(1, [3], "gone")
    assert box.http.post("/v1/responses", json=ASK).status_code == 503
    events = box.http.post("/v1/responses", json=ASK | {"stream": True}).text.split("\n\n")
    last = json.loads(events[-2].partition("data: ")[2])
    assert last["type"] == "response.failed"
    assert "layer 1" in last["response"]["error"]["message"]
    with pytest.raises(openai.InternalServerError):
        box.openai.responses.create(**ASK)


# A random model ends it soon.
TOOL: Any = {
    "type": "function",
    "name": "warmth",
    "strict": None,
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Oslo", "Łódź"]}},
        "required": ["town"],
    },
}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edit."}
CALL: Any = ASK | {
    "max_output_tokens": 150,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "warmth"},
}


def test_a_call_and_its_result(box: Box) -> None:
    response = box.openai.responses.create(**CALL)
    (item,) = response.output
    assert item.type == "function_call"
    assert json.loads(item.arguments)["town"] in ("Oslo", "Łódź")
    assert response.status == "completed"
    events = list(box.openai.responses.create(**CALL, stream=True))
    assert [event.type.removeprefix("response.") for event in events[2:-1]] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    output: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "17"}
    history = [{"role": "user", "content": "hi"}, item.to_dict(), output]
    sent = box.openai.responses.create(**ASK | {"input": history})
    stored = box.openai.responses.create(
        **ASK | {"input": [output]}, previous_response_id=response.id
    )
    assert stored.output_text == sent.output_text
    assert stored.usage == sent.usage
    assert stored.previous_response_id == response.id


def test_a_custom_tool(box: Box) -> None:
    choice: Any = {"type": "custom", "name": "patch"}
    body = CALL | {"tools": [PATCH, {"type": "web_search"}], "tool_choice": choice}
    response = box.http.post("/v1/responses", json=body)
    assert response.headers["x-eaas-ignored-fields"] == "tools.web_search"
    (item,) = response.json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
    events = list(box.openai.responses.create(**body, stream=True))
    deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
    assert deltas == [item["input"]]


def test_stored_responses(box: Box) -> None:
    first = box.openai.responses.create(**ASK)
    assert box.openai.responses.retrieve(first.id) == first
    streamed = list(box.openai.responses.create(**ASK, stream=True, previous_response_id=first.id))
    last: Any = streamed[-1]
    assert box.openai.responses.retrieve(last.response.id).output == last.response.output
    third = box.openai.responses.create(**ASK, previous_response_id=last.response.id)
    assert third.usage is not None
    assert last.response.usage is not None
    assert third.usage.input_tokens > last.response.usage.input_tokens
    box.openai.responses.delete(first.id)
    for use in (box.openai.responses.retrieve, box.openai.responses.delete):
        with pytest.raises(openai.NotFoundError):
            use(first.id)
    with pytest.raises(openai.BadRequestError, match="is stored here"):
        box.openai.responses.create(**ASK, previous_response_id=last.response.id)
    gone = box.openai.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        box.openai.responses.retrieve(gone.id)


def test_the_name_of_the_history_is_plain(box: Box) -> None:
    body = json.dumps(ASK | {"previous_response_id": "x"}).replace("_id", "\\u005fid")
    headers = {"content-type": "application/json"}
    response = box.http.post("/v1/responses", content=body.encode(), headers=headers)
    assert response.status_code == 400


def test_truncation(box: Box) -> None:
    turns = [{"role": "user", "content": f"{number} {'a' * 90}"} for number in range(9)]
    history: Any = [
        turn for each in turns for turn in (each, {"role": "assistant", "content": "b"})
    ]
    long = ASK | {"input": [*history, {"role": "user", "content": "hi"}]}
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        box.openai.responses.create(**long)
    cut = box.openai.responses.create(**long, truncation="auto")
    assert cut.truncation == "auto"
    assert cut.usage is not None
    assert 100 < cut.usage.input_tokens < 192
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        box.openai.responses.create(**ASK | {"input": "a" * 600}, truncation="auto")
