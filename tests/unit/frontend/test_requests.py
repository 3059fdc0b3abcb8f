import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.generation.errors import ApiError
from frontend.errors import error_event, error_response
from frontend.prompts.bodies import ChatRequest, CompletionRequest
from frontend.prompts.body import parse

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
DEEP: Any = {}
for _ in range(800):
    DEEP = {"items": DEEP}


DEEP_TOOL = {"type": "function", "function": {"name": "f", "parameters": DEEP}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
IMAGE = {"type": "image_url", "image_url": {}}


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **fields}}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters()),  # lone surrogates too
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMED = {"type": "function", "function": {"name": "g"}}
ANY_OBJECT = '{"type": "object"}'
FIELDS = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields])


@given(st.dictionaries(FIELDS | st.text(max_size=5), JSON, max_size=5), st.booleans())
def test_any_object_is_parsed_or_refused_with_a_reason(body: dict[str, Any], chat: bool) -> None:
    try:
        if chat:
            parse(ChatRequest, {"messages": [USER]} | body)
        else:
            parse(CompletionRequest, {"prompt": "x"} | body)
    except ApiError as error:
        refusal = error
    else:
        return
    assert refusal.status == 400
    assert refusal.message
    assert json.loads(bytes(error_response(refusal).body)) == refusal.body()
    assert error_event(refusal).count("\n") == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a" * 1025]}, "stop[0]"),
        ({"stream": "yes"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        # What is 0 or infinite in float32.
        ({"repetition_penalty": 1e-50}, "repetition_penalty"),
        ({"repetition_penalty": 3.5e38}, "repetition_penalty"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"top_p": 1e-50}, "top_p"),
        ({"min_p": float("inf")}, "min_p"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias.5"),
        ({"min_p": 1.1}, "min_p"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": json_schema()}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": "no schema"}, "guided_json"),
        ({"guided_json": DEEP}, "guided_json"),
        ({"guided_json": json.dumps(DEEP)}, "guided_json"),
        ({"tools": [DEEP_TOOL]}, "tools[0].function"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar"),
        ({"guided_regex": "a" * 65_537}, "guided_regex"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]}, "tool_choice"),
        ({"max_tokens": 16.5}, "max_tokens"),
        ({"n": True}, "n"),
        ({"priority": 1}, "priority"),
        ({"priority": False}, "priority"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"include_reasoning": False, "logprobs": True}, "include_reasoning"),
        ({"json_schema": {}, "grammar": "x"}, "grammar"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"audio": {}}, "audio"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)
def test_a_chat_request_is_refused_by_name(change: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, {"messages": [USER]} | change)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0, "top_p": 1, "top_k": -1, "n": 1, "seed": -5, "max_tokens": 3},
        {"stop": "x"},
        {"stop": ["x" * 1024] * 16},
        {"stop": None, "temperature": None, "stream": None, "n": None, "tools": None},
        {"max_tokens": 16.0, "seed": -1, "n": 1.0, "top_k": -1.0, "stop_token_ids": [3.0]},
        {"model": "", "functions": [], "function_call": "none", "web_search_options": None},
        {"priority": 0, "use_beam_search": False, "vllm_xargs": {}, "truncate_prompt_tokens": None},
        {"grammar": "", "format": "", "regex": None, "json_schema": None, "bad_words": []},
        {"structured_outputs": {"regex": "a", "json": None, "disable_any_whitespace": False}},
        {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1e-9, "min_p": 1},
        {"logit_bias": {"5": -100, "6": 1.5}, "stop_token_ids": [3], "n": 128},
        {"logprobs": True, "top_logprobs": 20, "skip_special_tokens": False},
        {"top_logprobs": 0, "include_stop_str_in_output": True},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"response_format": {"type": "text"}, "modalities": ["text"], "tool_choice": "auto"},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [CALL, {"role": "tool", "tool_call_id": "1", "content": "x", "name": "f"}]},
    ],
)
def test_a_chat_request_is_accepted(change: dict[str, Any]) -> None:
    parse(ChatRequest, {"messages": [USER]} | change)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        ("", [""]),
        ([1, 2], [[1, 2]]),
        (["x"], ["x"]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [2, 3]], ["a", [2, 3]]),
    ],
)
def test_forms_of_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert parse(CompletionRequest, {"prompt": prompt}).prompt == prompts


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [[]], [1, "a"], [[1], 2], [True], [1.0], {"a": 1}, ["a"] * 1025]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest, {"prompt": prompt})
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "change",
    [
        {"best_of": 2},
        {"best_of": 2, "n": 3},
        {"logprobs": 21},
        {"logprobs": True},
        {"max_tokens": -1},
        {"suffix": "x"},
    ],
)
def test_a_completion_request_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionRequest, {"prompt": "x"} | change)
    assert caught.value.param == next(iter(change))


@pytest.mark.parametrize(
    "change",
    [
        {"echo": True, "max_tokens": 0, "logprobs": 20},
        {"n": 3, "best_of": 3},
        {"best_of": 1},
        {"logprobs": 0, "stream": True},
    ],
)
def test_a_completion_request_is_accepted(change: dict[str, Any]) -> None:
    request = parse(CompletionRequest, {"prompt": ["x", [1, 2]]} | change)
    again = parse(CompletionRequest, request.settings())
    assert again.settings() == request.settings()
    assert again.prompt == [""]


@pytest.mark.parametrize(
    ("change", "field", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "json", ANY_OBJECT),
        (
            {"response_format": json_schema(schema={})},
            *("response_format.json_schema.schema", "json", "{}"),
        ),
        ({"structured_outputs": {"json": "{}"}}, "structured_outputs.json", "json", "{}"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "regex", "a"),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            "json",
            ANY_OBJECT,
        ),
        ({"guided_json": {"type": "null"}}, "guided_json", "json", '{"type": "null"}'),
        ({"json_schema": {"type": "null"}}, "json_schema", "json", '{"type": "null"}'),
        ({"json_schema": '{"const": 1}'}, "json_schema", "json", '{"const": 1}'),
        ({"format": "json"}, "format", "json", ANY_OBJECT),
        ({"format": {"const": 1}}, "format", "json", '{"const": 1}'),
        ({"grammar": "root ::= x"}, "grammar", "grammar", "root ::= x"),
        ({"ebnf": "root ::= x"}, "ebnf", "grammar", "root ::= x"),
        ({"regex": "a"}, "regex", "regex", "a"),
        (
            {"response_format": {"type": "json_object", "schema": {"const": 1}}},
            "response_format.schema",
            "json",
            '{"const": 1}',
        ),
        ({"guided_choice": ["a", '"']}, "guided_choice", "lark", r'start: "a" | "\""'),
        ({"guided_grammar": "start: A"}, "guided_grammar", "grammar", "start: A"),
    ],
)
def test_a_constraint_of_an_answer(
    change: dict[str, Any], field: str, kind: str, text: str
) -> None:
    request = parse(ChatRequest, {"messages": [USER]} | change)
    # The prompt worker sends a large request back without its prompt.
    for read in (request, parse(ChatRequest, json.loads(json.dumps(request.settings())))):
        assert read.constraint is not None
        assert read.constraint.field == field
        assert (read.constraint.part.kind, read.constraint.part.text) == (kind, text)


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_text_has_no_constraint(form: Any) -> None:
    assert parse(CompletionRequest, {"prompt": "x", "response_format": form}).constraint is None


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        (None, []),
        ("auto", []),
        ("none", []),
        ("required", ["f", "g"]),
        (NAMED, ["g"]),
    ],
)
def test_tools_that_the_answer_must_call(choice: Any, forced: list[str]) -> None:
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    body = {"messages": [USER], "tools": [TOOL, other], "tool_choice": choice}
    request = parse(ChatRequest, body)
    assert [tool.name for tool in request.forced_tools] == forced
    again = parse(ChatRequest, request.settings())
    assert again.forced_tools == request.forced_tools
    assert again.offered_tools == request.offered_tools


def test_unknown_fields_are_ignored_and_named() -> None:
    body = {
        "messages": [USER | {"odd": 1}],
        "tempreature": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "odd": 2},
        "response_format": {"type": "text", "odd": 3},
    }
    request = parse(ChatRequest, body)
    assert request.ignored == (
        "tempreature",
        "response_format.odd",
        "stream_options.odd",
        "messages[0].odd",
    )
    assert not parse(ChatRequest, request.settings()).ignored
    many = parse(ChatRequest, {"messages": [USER]} | {f"x{i}": 0 for i in range(100)})
    assert len(many.ignored) == 16


def test_names_of_ignored_fields_are_safe_in_a_header() -> None:
    fields = dict.fromkeys(["a\r\nb: c", "é,", "n" * 500], 1)
    named = f"a%0D%0Ab%3A%20c, %C3%A9%2C, {'n' * 40}"
    for unknown, header in (
        (fields, {"X-Eaas-Ignored-Fields": named}),
        ({"": 1}, {"X-Eaas-Ignored-Fields": '""'}),
        ({}, {}),
    ):
        assert parse(CompletionRequest, {"prompt": "x"} | unknown).ignored_header == header


def test_a_refusal_names_the_engine_that_has_the_field() -> None:
    with pytest.raises(ApiError, match="eaas up --engine vllm"):
        parse(ChatRequest, {"messages": [USER], "prompt_logprobs": 1})


def test_neutral_values_mean_nothing() -> None:
    body = {"messages": [USER], "max_tokens": 16.0, "seed": -1, "model": ""}
    request = parse(ChatRequest, body)
    assert (request.max_tokens, request.seed, request.model) == (16, None, None)
    again = parse(ChatRequest, request.settings())
    assert (again.max_tokens, again.seed, again.model) == (16, None, None)
