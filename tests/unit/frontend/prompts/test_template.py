"""Chat templates that fail: status 400, and the words say whose error it is."""

from typing import Any

import pytest

from eaas.generation.errors import ApiError
from eaas_cli.demo_model.tokenizer import build_tokenizer
from frontend.prompts.bodies import ChatRequest, TokenizeRequest
from frontend.prompts.reader import ModelLimits, PromptReader, missing_template
from frontend.prompts.responses_body import ResponsesRequest

FAILING = {
    "ZeroDivisionError": "{{ 1 // 0 }}",
    "UndefinedError": "{{ messages.foo.bar }}",
    "AttributeError": "{{ [1] | dictsort }}",
    "RecursionError": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "OverflowError": "{% for i in range(10 ** 9) %}{% endfor %}",
    "TypeError": "{{ 'a' + 1 }}",
    "MemoryError": "{{ 'a' * (2 ** 62) }}",
    "TemplateSyntaxError": "{% if %}",
    "UnicodeEncodeError": r"{{ 'a\ud800b' }}",
}
BODIES: list[tuple[Any, bytes, str]] = [
    (ChatRequest, b'{"messages": [{"role": "user", "content": "x"}]}', "messages"),
    (ChatRequest, b'{"stream": true, "messages": [{"role": "user", "content": "x"}]}', "messages"),
    (TokenizeRequest, b'{"messages": [{"role": "user", "content": "x"}]}', "messages"),
    (ResponsesRequest, b'{"input": "x"}', "input"),
]
TOOLS = b', "tools": [{"type": "function", "function": {"name": "now"}}]}'


def refusal(template: Any, cls: Any = ChatRequest, body: bytes = BODIES[0][1]) -> ApiError:
    tokenizer = build_tokenizer(300, 64)
    tokenizer.chat_template = template
    with pytest.raises(ApiError) as caught:
        PromptReader(tokenizer, ModelLimits(64, 300)).read(cls, body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("kind", FAILING)
def test_a_template_that_fails(kind: str) -> None:
    for cls, body, field in BODIES:
        error = refusal(FAILING[kind], cls, body)
        assert f"chat template fails on these messages: {kind}: " in error.message
        assert error.param == field


def test_a_template_that_refuses() -> None:
    message = refusal("{{ raise_exception('no such turn') }}").message
    assert message == "The model's chat template refuses these messages: no such turn"
    # JSON of an answer holds no half of a surrogate pair.
    message = refusal(r"{{ raise_exception('\ud800') }}").message
    assert message == r"The model's chat template refuses these messages: \ud800"


@pytest.mark.parametrize("names", [{"rag": "R", "plain": "P"}, {"tool_use": "T"}])
def test_named_templates_without_a_default(names: dict[str, str]) -> None:
    bodies = [*BODIES]
    if "tool_use" not in names:
        bodies.append((ChatRequest, BODIES[0][1][:-1] + TOOLS, "messages"))
    for cls, body, _ in bodies:
        message = refusal(names, cls, body).message
        assert ", ".join(map(repr, names)) in message
        assert "none of them 'default'. Use /v1/completions instead." in message


def test_the_template_for_tools_needs_no_default() -> None:
    tokenizer = build_tokenizer(300, 64)
    tokenizer.chat_template = {"tool_use": "{{ tools[0].function.name }}"}
    assert missing_template(tokenizer)
    assert not missing_template(tokenizer, tools=True)
    reader = PromptReader(tokenizer, ModelLimits(64, 300))
    _, (prompt,) = reader.read(ChatRequest, BODIES[0][1][:-1] + b', "max_tokens": 9' + TOOLS)
    assert tokenizer.decode(prompt) == "now"


def test_no_template() -> None:
    assert "no chat template. Use /v1/completions" in refusal(None).message
