"""Structured output and forced tool calls: OpenAI's client, both engines, bad grammars, streams."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
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


def test_openai_parse(engine: Box) -> None:
    chat = CHAT | {"temperature": 1.0, "max_tokens": 160}
    ages = []
    for seed in range(5):
        answer = engine.openai.chat.completions.parse(**chat, seed=seed, response_format=Person)
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.parsed is not None
        ages.append(choice.message.parsed.age)
    assert len(set(ages)) > 1


def test_openai_streams_parsed_answers(engine: Box) -> None:
    fields = CHAT | {"temperature": 1.0, "seed": 2, "max_tokens": 160}
    chat = engine.openai.chat.completions
    with chat.stream(**fields, response_format=Person) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert message.parsed == chat.parse(**fields, response_format=Person).choices[0].message.parsed
    named = {"type": "function", "function": {"name": "Person"}}
    tools = [openai.pydantic_function_tool(Person)]
    with chat.stream(**fields, tools=tools, tool_choice=named) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Person)
    assert "tool_calls.function.arguments.done" in kinds


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
    engine: Box, fields: dict[str, Any], pattern: str, temperature: float
) -> None:
    # ignore_eos and min_tokens do not delay the end.
    body = {"max_tokens": 60, "temperature": temperature, "seed": 1, "min_tokens": 50} | fields
    choice = engine.complete(**body)["choices"][0]
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_bad_constraint_is_refused(box: Box, fields: dict[str, Any], param: str) -> None:
    response = box.http.post("/v1/completions", json={"prompt": "a", "stream": True} | fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert param in error["message"]


def test_an_answer_that_cannot_go_on_ends_alone(engine: Box) -> None:
    large = r"(\p{L}|\d|\w){1,1000}" * 50
    with ThreadPoolExecutor(2) as pool:
        free = pool.submit(engine.complete, "Hello", max_tokens=24)
        body = {"prompt": "a", "max_tokens": 150, "guided_regex": large}
        response = engine.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert error_of(response)["param"] == "guided_regex"
        assert free.result()["choices"][0]["text"] == engine.text("Hello")
    engine.wait_idle()


def test_arguments_have_the_named_properties_only(box: Box) -> None:
    inner = {"type": "object", "properties": {"y": {"enum": [3, 4]}}, "required": ["y"]}
    outer = {
        "type": "object",
        "properties": {"x": {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}},
        "required": ["x"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": outer}}
    choice = {"type": "function", "function": {"name": "f"}}
    body = CHAT | {"tools": [tool], "tool_choice": choice, "temperature": 1.0, "n": 8, "seed": 1}
    answer = box.http.post("/v1/chat/completions", json=body | {"max_tokens": 170}).json()
    for each in answer["choices"]:
        (call,) = each["message"]["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        assert found.keys() == {"x"}
        assert all(item in ({"y": 3}, {"y": 4}) for item in found["x"])


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_follows_the_schema(engine: Box, stream: bool) -> None:
    closed = Person.model_json_schema() | {"additionalProperties": False}
    body = CHAT | {
        "n": 3,
        "temperature": 1.0,
        "seed": 1,
        "max_tokens": 160,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": closed},
        },
        "stream": stream,
    }
    response = engine.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    texts = [""] * 3
    if stream:
        for event in events(response.text):
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        texts = [each["message"]["content"] for each in response.json()["choices"]]
    people = [Person.model_validate_json(text) for text in texts]
    assert len({person.model_dump_json() for person in people}) > 1


def test_each_prompt_follows_the_choices(engine: Box) -> None:
    answer = engine.complete(
        ["Hello", "abc"], n=3, guided_choice=["red", "green"], temperature=2.0, seed=3
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 6
    assert set(texts) == {"red", "green"}
    again = engine.complete("Hello", echo=True, guided_choice=["red", "green"])
    assert again["choices"][0]["text"] in ("Hellored", "Hellogreen")


def test_stop_tokens_end_an_answer_before_its_grammar_does(engine: Box) -> None:
    (stop,) = engine.tokenizer("b", add_special_tokens=False)["input_ids"]
    body = {"guided_regex": "[ab]{50}", "stop_token_ids": [stop], "max_tokens": 60}
    likely = {"logit_bias": {str(stop): 100}}
    first = engine.complete(**body, **likely)["choices"][0]
    assert (first["text"], first["finish_reason"]) == ("", "stop")
    late = engine.complete(**body, **likely, min_tokens=7)["choices"][0]
    assert (late["text"], late["finish_reason"]) == ("a" * 7, "stop")


def test_penalties_and_biases_act_within_the_grammar(engine: Box) -> None:
    a, b, z = engine.tokenizer("abz", add_special_tokens=False)["input_ids"]
    body = {"guided_regex": "[ab]{8}", "logit_bias": {str(a): 50, str(z): 100}}
    assert engine.complete(**body)["choices"][0]["text"] == "a" * 8
    body["logit_bias"][str(b)] = 50
    turns = engine.complete(**body, frequency_penalty=2)["choices"][0]["text"]
    assert min(turns.count("a"), turns.count("b")) > 1


def test_a_continued_message_is_not_part_of_the_grammar(box: Box) -> None:
    body = {
        "messages": [{"role": "assistant", "content": "yes or "}],
        "continue_final_message": True,
        "guided_choice": ["no", "yes"],
    }
    answer = box.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] in ("no", "yes")


def test_calls_of_several_choices_have_different_ids(box: Box) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    body = CHAT | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 150, "n": 2}
    answer = box.http.post("/v1/chat/completions", json=body).json()
    calls = [each["message"]["tool_calls"] for each in answer["choices"]]
    ids = {call["id"] for each in calls for call in each}
    body["stream"] = True
    streamed = box.http.post("/v1/chat/completions", json=body).text
    choices = [each for event in events(streamed) for each in event["choices"]]
    deltas = [call for each in choices for call in each["delta"].get("tool_calls", ())]
    assert len(ids) == len({call["id"] for call in deltas}) == 2
