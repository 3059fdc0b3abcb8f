"""Grammars of chat answers in a model's own format: reasoning, JSON, tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers.cli.serving.utils import (
    _RESPONSE_TEMPLATE_FALLBACKS,
    ReasoningText,
    ToolCall,
    response_events_to_chunks,
)
from transformers.utils.chat_parsing import ResponseParser

from attention_client.serving.grammars.compiler import GrammarCompiler
from attention_client.serving.prompts.bodies import ChatRequest, parse
from attention_client.serving.requests.chat_form import chat_form
from attention_client.serving.requests.form import JsonCalls
from byte_tokenizer import byte_tokenizer
from guided import compiled, random_answer

QWEN = next(t for types, t in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3_moe" in types)
XML = next(t for types, t in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3_5" in types)
# As QWEN, with the name in the text that opens a call.
NAMED_OPENING: dict[str, Any] = QWEN | {
    "fields": QWEN["fields"]
    | {
        "tool_calls": {
            "open_pattern": r"\s*<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        }
    }
}
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


@pytest.fixture(scope="module", params=["as text", "as tokens"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """A byte tokenizer; the marks of the format are text, or tokens of their own."""
    tokenizer = byte_tokenizer("<unk>", "</s>", eos_token="</s>")
    if request.param == "as tokens":
        marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer.add_tokens([AddedToken(mark, special="think" in mark) for mark in marks])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [257])
    yield compiler
    compiler.close()


@pytest.fixture
def answers(tokenizer: Any, compiler: GrammarCompiler) -> Callable[..., list[list[Any]]]:
    """Draws answers of a random model to a request, split by the parser of a template."""

    def answers(
        fields: dict[str, Any], template: dict[str, Any] = QWEN, prompt: str = PROMPT
    ) -> list[list[Any]]:
        request = parse(ChatRequest, {"messages": [USER]} | fields)
        form = chat_form(request, template, ResponseParser(template, prefix=prompt, tools=None))
        assert form is not None
        grammar = compiled(compiler, form.source, form.field)
        found = []
        for seed in range(12):
            parser = ResponseParser(template, prefix=prompt, tools=None)
            tokens = random_answer(grammar, len(tokenizer), seed, most=3000)
            if tokens is None:
                continue  # it reasons for ever
            events = [*parser.feed(tokenizer.decode(tokens)), *parser.finalize()[1]]
            pieces = response_events_to_chunks(events)
            if form.reader is not None:
                reader = form.reader()
                for piece in pieces:
                    if isinstance(piece, str) and not isinstance(piece, ReasoningText):
                        reader.push(piece)
                pieces = [piece for piece in pieces if isinstance(piece, ReasoningText)]
                pieces += [ToolCall(*call) for call in reader.calls()]
            found.append(pieces)
        assert len(found) > 5
        return found

    return answers


def content(pieces: list[Any]) -> str:
    return "".join(p for p in pieces if isinstance(p, str) and not isinstance(p, ReasoningText))


def test_reasoning_may_precede_json(answers: Callable[..., Any]) -> None:
    found = answers({"response_format": FORM})
    assert all(json.loads(content(pieces)) in (1, "two") for pieces in found)


@pytest.mark.parametrize(
    ("prompt", "text", "complete"),
    [
        (PROMPT, "1", True),
        (PROMPT, '<think>1 <tab> {"</think>\n\n"two"', True),
        (PROMPT, "<think>1", False),
        (PROMPT, "<think>a</think>b</think>1", False),
        (f"{PROMPT}<think>\n", "1", False),
        (f"{PROMPT}<think>\n", "1</think>\n1", True),
        (f"{PROMPT}<think>\n\n</think>\n\n", "1", True),
        (f"{PROMPT}<think>\n\n</think>\n\n", "<think>a</think>1", False),
    ],
)
def test_reasoning_ends_before_the_answer(
    tokenizer: Any, compiler: GrammarCompiler, prompt: str, text: str, complete: bool
) -> None:
    request = parse(ChatRequest, {"messages": [USER], "response_format": FORM})
    form = chat_form(request, QWEN, ResponseParser(QWEN, prefix=prompt, tools=None))
    assert form is not None
    guide = compiled(compiler, form.source, form.field).guide(0, 0)
    allowed = guide.allowed([])
    for token in tokenizer(text)["input_ids"]:
        if not allowed[token]:
            assert not complete
            return
        allowed = guide.allowed([token])
    assert allowed[257] == complete


@pytest.mark.parametrize("template", [QWEN, NAMED_OPENING, XML], ids=["whole", "named", "xml"])
@pytest.mark.parametrize("parallel", [None, False])
def test_required_calls_have_the_format_of_the_model(
    answers: Callable[..., Any], template: dict[str, Any], parallel: bool | None
) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    counts = set()
    for pieces in answers(fields, template):
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        counts.add(len(calls))
        assert {call.name for call in calls} <= {"f", "g"}
        assert all(json.loads(call.arguments)["x"] in (1, "two") for call in calls)
        assert not content(pieces).strip()
    assert min(counts) >= 1
    assert (max(counts) > 1) == (parallel is None)


def test_a_named_call(answers: Callable[..., Any]) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    for template in (QWEN, NAMED_OPENING, XML):
        for pieces in answers({"tools": TOOLS, "tool_choice": choice}, template):
            (call,) = (piece for piece in pieces if isinstance(piece, ToolCall))
            assert call.name == "g"
            assert json.loads(call.arguments)["x"] in (1, "two")


def test_json_or_calls_where_both_are_allowed(answers: Callable[..., Any]) -> None:
    kinds = set()
    for pieces in answers({"tools": TOOLS, "response_format": FORM}):
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        assert calls or json.loads(content(pieces)) in (1, "two")
        kinds.add(bool(calls))
    assert kinds == {True, False}
    # No call where the tools are not offered.
    fields = {"tools": TOOLS, "response_format": FORM, "tool_choice": "none"}
    assert all(json.loads(content(pieces)) in (1, "two") for pieces in answers(fields))


def test_a_name_that_the_format_cannot_hold_becomes_json() -> None:
    tool = {"type": "function", "function": {"name": "get-weather"}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    parser = ResponseParser(NAMED_OPENING, prefix=PROMPT, tools=None)
    form = chat_form(parse(ChatRequest, body), NAMED_OPENING, parser)
    assert form is not None
    assert form.reader is not None


def test_a_model_without_a_template_answers_with_json() -> None:
    request = parse(ChatRequest, {"messages": [USER], "tools": TOOLS, "tool_choice": "required"})
    form = chat_form(request, QWEN, None)
    assert form is not None
    assert form.reader is not None
    text = form.source(json.dumps).parts[0].text
    assert text.startswith('start: "[" call (", " call)* "]"\n')


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("f", '{"a": 1}', [("f", '{"a": 1}')]),
        ("f", '{"a": ', [("f", '{"a": ')]),  # cut off
        ("f", "", []),
        (
            None,
            '[{"name": "f", "parameters": {"a": "}{"}}, {"name": "g", "parameters": {}}]',
            [("f", '{"a": "}{"}'), ("g", "{}")],
        ),
        (None, '[{"name": "f", "parameters": {}}, {"name": "g", "par', [("f", "{}")]),
        (None, "[", []),
    ],
)
def test_calls_are_read_from_json(
    name: str | None, text: str, calls: list[tuple[str, str]]
) -> None:
    reader = JsonCalls(name)
    for character in text:
        reader.push(character)
    assert list(reader.calls()) == calls
