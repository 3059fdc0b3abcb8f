"""Structured output and forced tool calls: OpenAI's client, both engines, bad grammars, streams."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from http_box import CHAT, SIZES, Box, error_of, events

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


def _object(**properties: Any) -> dict[str, Any]:
    fields = {"properties": properties, "required": list(properties)}
    return {"type": "object", **fields, "additionalProperties": False}


def _list(items: Any, most: int = 2, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_SHORT = {"type": "string", "maxLength": 5}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
# 20 schemas: models of pydantic, and keywords of JSON Schema.
SCHEMAS: list[dict[str, Any]] = [
    Person.model_json_schema() | {"additionalProperties": False},
    _object(),
    _object(x=_DIGIT, y={"type": "integer", "exclusiveMinimum": -100, "maximum": 100}),
    _object(price={"type": "number", "minimum": 0.5, "maximum": 2}),
    _object(yes={"type": "boolean"}, none={"type": "null"}),
    _object(kind={"enum": ["red", "grün", 7, None, False, ["x"]]}),
    _object(version={"const": {"major": 1, "tags": []}}),
    _object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    _object(text={"type": "string", "minLength": 3, "maxLength": 12}),
    _object(day={"type": "string", "format": "date"}),
    _object(id={"type": "string", "format": "uuid"}),
    _object(host={"type": "string", "format": "ipv4"}),
    _object(tags=_list({"enum": ["a", "b"]}, most=4, least=2)),
    _object(grid=_list(_list(_DIGIT, most=3, least=1))),
    _object(pair={"type": "array", "prefixItems": [_DIGIT, _SHORT], "items": False, "minItems": 2}),
    _object(a=_object(b=_object(c=_object(d=_DIGIT)))),
    _object(value={"anyOf": [_DIGIT, _SHORT, {"type": "null"}]}),
    _object(value={"type": ["boolean", "null"]}, **{'q"uo\\te': _DIGIT, "é 日": _SHORT}),
    {"type": "object", "properties": {"a": _DIGIT, "b": _SHORT}, "additionalProperties": False},
    {
        "$defs": {"node": _object(name=_SHORT, next={"anyOf": [_DIGIT, {"$ref": "#/$defs/leaf"}]})},
        **_object(nodes=_list({"$ref": "#/$defs/node"})),
    },
]
SCHEMAS[-1]["$defs"]["leaf"] = _object(leaf={"allOf": [_DIGIT, {"minimum": 5}]})


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
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


def test_openai_streams_parsed_answers(any_box: Box) -> None:
    fields = CHAT | {"temperature": 1.0, "seed": 2, "max_tokens": 160}
    chat = any_box.openai.chat.completions
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


def test_arguments_have_the_named_properties_only(box: Box) -> None:
    inner = {"type": "object", "properties": {"y": {"enum": [3, 4]}}, "required": ["y"]}
    outer = {"type": "object", "properties": {"x": _list(inner, least=1)}, "required": ["x"]}
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
            assert choice["message"]["content"] is None
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


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_follows_the_schema(any_box: Box, stream: bool) -> None:
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
    response = any_box.http.post("/v1/chat/completions", json=body)
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


def test_200_of_200_answers_follow_their_schemas() -> None:
    box = Box(sizes=replace(SIZES, num_blocks=500))

    def answers(task: tuple[int, dict[str, Any]]) -> list[tuple[str, str]]:
        seed, schema = task
        body = CHAT | {"n": 10, "temperature": (0.5, 1.0, 1.5)[seed % 3], "seed": 100 * seed}
        named = {"name": "x", "schema": schema}
        body |= {"response_format": {"type": "json_schema", "json_schema": named}}
        response = box.http.post("/v1/chat/completions", json=body | {"max_tokens": 450})
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        return [(each["finish_reason"], each["message"]["content"]) for each in choices]

    try:
        with ThreadPoolExecutor(2) as pool:
            all_answers = list(pool.map(answers, enumerate(SCHEMAS)))
    finally:
        box.close()
    assert sum(map(len, all_answers)) == 200
    assert len({text for each in all_answers for _, text in each}) > 100
    # Not "date": RFC 3339 has a year 0, and Python has none.
    checker = jsonschema.FormatChecker(("uuid", "ipv4"))
    for schema, found in zip(SCHEMAS, all_answers, strict=True):
        for reason, text in found:
            assert reason == "stop", text
            jsonschema.validate(json.loads(text), schema, format_checker=checker)


def test_each_prompt_follows_the_choices(any_box: Box) -> None:
    answer = any_box.complete(
        ["Hello", "abc"], n=3, guided_choice=["red", "green"], temperature=2.0, seed=3
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 6
    assert set(texts) == {"red", "green"}
    again = any_box.complete("Hello", echo=True, guided_choice=["red", "green"])
    assert again["choices"][0]["text"] in ("Hellored", "Hellogreen")


def test_log_probabilities_do_not_depend_on_the_grammar(any_box: Box) -> None:
    answer = any_box.complete(guided_regex="[xyz]{9}", logprobs=1)["choices"][0]
    found = answer["logprobs"]
    assert "".join(found["tokens"][:9]) == answer["text"]
    # The likeliest token, which is reported beside the chosen one, is often forbidden.
    assert any(set(top) - set("xyz") for top in found["top_logprobs"])
    prompt = any_box.tokenizer("Hello")["input_ids"]
    tokens = any_box.tokenizer(answer["text"], add_special_tokens=False)["input_ids"]
    echo = any_box.complete([*prompt, *tokens], max_tokens=0, echo=True, logprobs=1)
    scored = echo["choices"][0]["logprobs"]["token_logprobs"]
    assert scored[len(prompt) :] == pytest.approx(found["token_logprobs"][:9], abs=1e-3)


def test_a_chat_reports_the_tokens_of_its_json(box: Box) -> None:
    body = CHAT | {
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"enum": ["one", 2]}},
        },
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    for choice in box.http.post("/v1/chat/completions", json=body).json()["choices"]:
        records = choice["logprobs"]["content"]
        assert all(len(record["top_logprobs"]) == 2 for record in records)
        shown = "".join(record["token"] for record in records).removesuffix("</s>")
        assert shown == choice["message"]["content"]
        assert json.loads(shown) in ("one", 2)


def test_stop_tokens_end_an_answer_before_its_grammar_does(any_box: Box) -> None:
    (stop,) = any_box.tokenizer("b", add_special_tokens=False)["input_ids"]
    body = {"guided_regex": "[ab]{50}", "stop_token_ids": [stop], "max_tokens": 60}
    likely = {"logit_bias": {str(stop): 100}}
    first = any_box.complete(**body, **likely)["choices"][0]
    assert (first["text"], first["finish_reason"]) == ("", "stop")
    late = any_box.complete(**body, **likely, min_tokens=7)["choices"][0]
    assert (late["text"], late["finish_reason"]) == ("a" * 7, "stop")


def test_penalties_and_biases_act_within_the_grammar(any_box: Box) -> None:
    a, b, z = any_box.tokenizer("abz", add_special_tokens=False)["input_ids"]
    body = {"guided_regex": "[ab]{8}", "logit_bias": {str(a): 50, str(z): 100}}
    assert any_box.complete(**body)["choices"][0]["text"] == "a" * 8
    body["logit_bias"][str(b)] = 50
    turns = any_box.complete(**body, frequency_penalty=2)["choices"][0]["text"]
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
