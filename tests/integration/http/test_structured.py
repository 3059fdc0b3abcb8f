"""Structured output and forced tool calls: OpenAI's client, both engines, bad grammars, streams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pydantic
import pytest

from http_box import CHAT, Box, error_of, events

pytestmark = pytest.mark.integration


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)
    age: int = pydantic.Field(ge=0, le=99)
    kind: Literal["a", "b"]


ONE_ARGUMENT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": ONE_ARGUMENT, "strict": True}}
    for name in ("f", "g")
]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def any_box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A server with continuous batching, and one that runs one request at a time."""
    box = Box(request.param)
    yield box
    box.close()


def test_openai_parse(any_box: Box) -> None:
    chat = CHAT | {"temperature": 1.0, "max_tokens": 160}
    ages = []
    for seed in range(5):
        answer = any_box.openai.chat.completions.parse(**chat, seed=seed, response_format=Person)
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.parsed is not None
        ages.append(choice.message.parsed.age)
    assert len(set(ages)) > 1


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}-\\d"}}, r"[a-c]{3}-\d"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"guided_choice": ["é", "ü"]}, "é|ü"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"guided_grammar": 'root ::= "y" [0-9]'}, "y[0-9]"),
        ({"structured_outputs": {"json": {"enum": [7, "z"]}}}, r'\s*(7|"z")\s*'),
        ({"guided_json": '{"const": [1]}'}, r"\[\s*1\s*\]"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_follows_its_constraint(
    any_box: Box, fields: dict[str, Any], pattern: str, temperature: float
) -> None:
    # ignore_eos and min_tokens do not delay the end.
    body = {"max_tokens": 60, "temperature": temperature, "seed": 1, "min_tokens": 50} | fields
    choice = any_box.complete(**body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["text"])


def test_guided_and_free_requests_share_a_batch(box: Box) -> None:
    box.slow_s = 0.005

    def ask(index: int) -> str:
        if index % 2:
            return str(box.complete("Hello")["choices"][0]["text"])
        guided = box.complete("Hello", guided_regex="[xyz]{9}", temperature=1.0, seed=index)
        return str(guided["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(16)))
    assert set(answers[1::2]) == {box.text("Hello")}
    assert all(re.fullmatch("[xyz]{9}", answer) for answer in answers[::2])


def test_evicted_requests_still_follow(box: Box) -> None:
    # Together they need more than the cache of 24 x 8 tokens.
    def ask(seed: int) -> str:
        body = {"guided_regex": "([a-c][0-9]){30}", "temperature": 1.0, "seed": seed}
        return str(box.complete("Hello", max_tokens=70, **body)["choices"][0]["text"])

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, range(4)))
    assert together == alone
    assert all(re.fullmatch("([a-c][0-9]){30}", answer) for answer in alone)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"json": {"type": "objekt"}}}, "structured_outputs.json"),
        ({"guided_grammar": "nonsense"}, "guided_grammar"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)
def test_a_bad_constraint_is_refused(box: Box, fields: dict[str, Any], param: str) -> None:
    response = box.http.post("/v1/completions", json={"prompt": "a", "stream": True} | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert param in error["message"]


def test_an_answer_that_cannot_go_on_ends_alone(any_box: Box) -> None:
    large = r"(\p{L}|\d|\w){1,1000}" * 50
    with ThreadPoolExecutor(2) as pool:
        free = pool.submit(any_box.complete, "Hello", max_tokens=24)
        body = {"prompt": "a", "max_tokens": 150, "guided_regex": large}
        response = any_box.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert error_of(response)["param"] == "guided_regex"
        assert free.result()["choices"][0]["text"] == any_box.text("Hello")
    any_box.wait_idle()


def test_a_named_tool_is_called(any_box: Box) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    answer = any_box.openai.chat.completions.create(
        **CHAT | {"max_tokens": 150}, tools=TOOLS, tool_choice=choice
    )
    assert answer.choices[0].finish_reason == "stop"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.name == "g"
    assert json.loads(call.function.arguments)["x"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_tool_is_called_where_required(box: Box, stream: bool, parallel: bool) -> None:
    counts = set()
    for seed in range(4):
        body = CHAT | {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": parallel,
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 165,
            "stream": stream,
        }
        response = box.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        if stream:
            choices = [event["choices"][0] for event in events(response.text)]
            calls = [call for each in choices for call in each["delta"].get("tool_calls", ())]
            reason = choices[-1]["finish_reason"]
            assert not any(each["delta"].get("content") for each in choices)
        else:
            (choice,) = response.json()["choices"]
            calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
            assert choice["message"]["content"] == ""
        if reason == "length":
            continue
        assert reason == "tool_calls"
        counts.add(len(calls))
        for call in calls:
            assert call["function"]["name"] in ("f", "g")
            assert json.loads(call["function"]["arguments"])["x"] in (1, 2)
    assert counts
    assert parallel or counts == {1}


def test_unknown_fields_are_ignored_and_named(box: Box) -> None:
    for body in ({"prompt": "Hello"}, {"prompt": "Hello", "stream": True}):
        response = box.http.post("/v1/completions", json=body | {"tempreature": 2, "a\r\nb": 1})
        assert response.status_code == 200
        assert response.headers["x-eaas-ignored-fields"] == "tempreature, a%0D%0Ab"
        assert "x-eaas-ignored-fields" not in box.http.post("/v1/completions", json=body).headers
