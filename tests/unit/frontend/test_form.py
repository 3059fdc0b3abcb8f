"""Grammars of chat answers in a model's own format: reasoning, JSON, tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from attention_client.generation.guide import Guide
from family_answers import family_tokenizer, merged, pieces_of
from frontend.families.family import BARE, JSON_LIST, CallFormat
from frontend.families.markup import NO_MARKUP
from frontend.grammars.compiler import GrammarCompiler
from frontend.prompts.bodies import ChatRequest
from frontend.prompts.body import parse
from frontend.requests.form import chat_form
from guided import compiled, random_answer

PROMPT = "<|im_start|>assistant\n"
ARGUMENTS = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/few"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"few": {"enum": [1, "two"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in ("f", "g")
]
USER = {"role": "user", "content": "hi"}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"enum": [1, "two"]}},
}


@pytest.fixture(params=["as text", "as tokens"])
def as_tokens(request: pytest.FixtureRequest) -> bool:
    """Whether the markup of the format is tokens of their own, or text."""
    return bool(request.param == "as tokens")


@pytest.fixture(scope="module")
def compilers() -> Iterator[Callable[[Any], GrammarCompiler]]:
    """Compilers of grammars for tokenizers."""
    made: dict[int, GrammarCompiler] = {}

    def compiler(tokenizer: Any) -> GrammarCompiler:
        if id(tokenizer) not in made:
            made[id(tokenizer)] = GrammarCompiler(
                tokenizer, len(tokenizer), [tokenizer.eos_token_id]
            )
        return made[id(tokenizer)]

    yield compiler
    for each in made.values():
        each.close()


def asked(fields: dict[str, Any], opening: str = PROMPT) -> ChatRequest:
    request = parse(ChatRequest, {"messages": [USER]} | fields)
    request.found["opening"] = opening
    return request


@pytest.fixture
def answers(compilers: Callable[[Any], GrammarCompiler], as_tokens: bool) -> Callable[..., Any]:
    """Draws answers of a random model to a request, and reads them."""

    def answers(
        fields: dict[str, Any], family: str = "hermes", opening: str = PROMPT
    ) -> list[dict[str, Any]]:
        tokenizer, markup = family_tokenizer(family, as_tokens=as_tokens)
        request = asked(fields, opening)
        form = chat_form(request, markup)
        assert form.source is not None
        grammar = compiled(compilers(tokenizer), form.source, form.field)
        found = []
        for seed in range(8):
            tokens = random_answer(grammar, len(tokenizer), seed, most=3000)
            if tokens is None:
                continue  # it reasons for ever
            found.append(merged(pieces_of(form.reader(), tokenizer, markup, tokens)))
        assert len(found) > 3
        return found

    return answers


def test_an_answer_is_what_the_format_says(answers: Callable[..., Any]) -> None:
    for answer in answers({"response_format": FORM}):
        assert json.loads(answer["content"]) in (1, "two")
        assert not answer["reasoning"]
    for answer in answers({"structured_outputs": {"choice": ["yes", "no"]}}):
        assert answer["content"] in ("yes", "no")


def test_a_model_that_would_call_for_ever_ends_after_some_calls(
    answers: Callable[..., Any],
) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    counts = [len(answer["calls"]) for answer in answers(tools)]
    assert 1 <= min(counts) <= max(counts) <= 16


@pytest.mark.parametrize("as_tokens", [True])  # letters at random never end the thought
def test_an_answer_follows_the_thought_that_the_prompt_opened(answers: Callable[..., Any]) -> None:
    fields = {"structured_outputs": {"choice": ["yes", "no"]}}
    found = answers(fields, "hermes", f"{PROMPT}<think>\n")
    assert {answer["content"] for answer in found} == {"yes", "no"}


@pytest.mark.parametrize(
    ("opening", "text", "complete"),
    [
        (PROMPT, "1", True),
        (PROMPT, " 1", False),
        (PROMPT, "<think>a</think>1", False),
        (f"{PROMPT}<think>\n", "1", False),
        (f"{PROMPT}<think>\n", "a</think>b</think>1", False),
        (f"{PROMPT}<think>\n", '1 <tab> {"</think>\n\n"two"', True),
        (f"{PROMPT}<think>\n\n</think>\n\n", "1", True),
        (f"{PROMPT}<think>\n\n</think>\n\n", "<think>a</think>1", False),
    ],
)
def test_reasoning_ends_before_the_answer(
    compilers: Callable[[Any], GrammarCompiler],
    as_tokens: bool,
    opening: str,
    text: str,
    complete: bool,
) -> None:
    tokenizer, markup = family_tokenizer("hermes", as_tokens=as_tokens)
    form = chat_form(asked({"response_format": FORM}, opening), markup)
    assert form.source is not None
    guide = Guide(compiled(compilers(tokenizer), form.source, form.field), 0)
    allowed = guide.allowed([])
    for token in tokenizer(text)["input_ids"]:
        if not allowed[token]:
            assert not complete
            return
        allowed = guide.allowed([token])
    assert allowed[tokenizer.eos_token_id] == complete


@pytest.mark.parametrize(
    ("family", "as_tokens", "parallel"),
    [
        ("hermes", False, None),
        ("hermes", True, False),
        ("kimi_k2", True, None),
        ("deepseek_v3", True, None),
        ("deepseek_v3", False, False),
        ("mistral", False, None),
        ("qwen3_coder", True, None),
    ],
)
def test_calls_that_must_be_have_the_format_of_the_model(
    answers: Callable[..., Any], family: str, parallel: bool | None
) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    counts = set()
    for answer in answers(fields, family):
        calls = answer["calls"]
        counts.add(len(calls))
        assert {name for name, _ in calls} <= {"f", "g"}
        assert all(json.loads(arguments)["x"] in (1, "two") for _, arguments in calls)
        assert not answer["content"]
    assert min(counts) >= 1
    assert (max(counts) > 1) == (parallel is None)
    named = {"type": "function", "function": {"name": "g"}}
    for answer in answers(fields | {"tool_choice": named}, family):
        ((name, arguments),) = answer["calls"]
        assert name == "g"
        assert json.loads(arguments)["x"] in (1, "two")


def test_json_or_calls_where_both_are_allowed(answers: Callable[..., Any]) -> None:
    kinds = set()
    for answer in answers({"tools": TOOLS, "response_format": FORM}):
        assert answer["calls"] or json.loads(answer["content"]) in (1, "two")
        kinds.add(bool(answer["calls"]))
    assert kinds == {True, False}
    # No call where the tools are not offered.
    fields = {"tools": TOOLS, "response_format": FORM, "tool_choice": "none"}
    assert all(json.loads(answer["content"]) in (1, "two") for answer in answers(fields))


def test_a_model_without_a_family_answers_with_json() -> None:
    form = chat_form(asked({"tools": TOOLS, "tool_choice": "required"}), NO_MARKUP)
    assert form.source is not None
    text = form.source(json.dumps)[0].text
    assert text.startswith('start: "[" call (", " call){0,15} "]"\n')


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (BARE, '{"a": 1}', [("f", '{"a": 1}')]),
        (BARE, '{"a": ', [("f", '{"a": ')]),  # cut off
        (BARE, "", []),
        (BARE, '{"a": 1}</s>', [("f", '{"a": 1}')]),
        (
            JSON_LIST,
            '[{"name": "f", "parameters": {"a": "}{"}}, {"name": "fg", "parameters": {}}]',
            [("f", '{"a": "}{"}'), ("fg", "{}")],
        ),
        (JSON_LIST, '[{"name": "f", "parameters": {}}, {"name": "fg", "par', [("f", "{}")]),
        (JSON_LIST, '[{"name": "f", "parameters": {"a": "b', [("f", '{"a": "b')]),
        (JSON_LIST, "[", []),
    ],
)
def test_calls_are_read_from_json(
    form: CallFormat, text: str, calls: list[tuple[str, str]]
) -> None:
    assert list(form.read(text, ["f", "fg"] if form is JSON_LIST else ["f"])) == calls
