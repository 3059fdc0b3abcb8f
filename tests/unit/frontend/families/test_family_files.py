"""Each family's file: what it says of calls, a model's answers in its form, what fits which model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from family_answers import FAMILIES, family_tokenizer, merged, pieces_of
from frontend.families.family import pythonic
from frontend.families.reader import AnswerReader, Calls

CALLING = sorted(name for name, family in FAMILIES.items() if "call" in family)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Zürich, "old"\n  town', "unit": "C"}),
    ("now", {}),
    ("mcp-read_file2", {"path": "a<b>c/{d}[e]", "note": "x = (1, 2); {name}"}),
]
REASONING = {
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    "mistral_v11": "[THINK]Hm.[/THINK]",
}


def written(family: dict[str, Any], calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as the family's `call` says that the model writes them."""
    form = family["call"]
    texts = [
        form["text"]
        .replace("{index}", str(index))
        .replace("{name}", name)
        .replace("{arguments}", json.dumps(arguments, ensure_ascii=False))
        for index, (name, arguments) in enumerate(calls)
    ]
    return form["start"] + form["separator"].join(texts) + form["end"]


def read(name: str, answer: str, opening: str = "", *, as_tokens: bool = True) -> dict[str, Any]:
    tokenizer, markup = family_tokenizer(name, as_tokens=as_tokens)
    reader = AnswerReader(markup, opening=opening, calls=Calls.ANYWHERE)
    found = merged(pieces_of(reader, tokenizer, markup, tokenizer(answer)["input_ids"]))
    calls = [(function, json.loads(arguments)) for function, arguments in found["calls"]]
    return found | {"calls": calls}


@pytest.mark.parametrize("name", CALLING)
def test_calls_as_the_family_writes_them_are_read_back(name: str) -> None:
    for some in (CALLS[:1], CALLS[1:2], CALLS):
        for as_tokens in (True, False) if name != "gpt_oss" else (True,):
            answer = read(name, written(FAMILIES[name], some), as_tokens=as_tokens)
            assert answer == {"content": "", "reasoning": "", "calls": some}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_reasoning_content_and_calls(name: str) -> None:
    family = FAMILIES[name]
    thought = REASONING.get(name, "<think>\nHm.\n</think>\n\n" if name != "mistral" else "")
    reasoning = {"reasoning": "Hm." if thought else ""}
    content = family.get("content", "") + "Paris"
    message = {"content": "Paris", "calls": []}
    assert read(name, thought + content) == message | reasoning
    assert read(name, content) == message | {"reasoning": ""}
    if "call" not in family:
        return
    end = "<|end|><|start|>assistant" if name == "gpt_oss" else "\n\n"
    answer = thought + content + end + written(family, CALLS[:1])
    found = read(name, answer)
    assert found.pop("content").strip() == "Paris"
    assert found == reasoning | {"calls": CALLS[:1]}


@pytest.mark.parametrize(
    ("name", "opening", "answer", "reasoning"),
    [
        ("hermes", "<think>\n", "Hm.\n</think>\n\nParis", "Hm."),
        ("hermes", "<think>\n\n</think>\n\n", "Paris", None),
        ("deepseek_v3", "<think>\n", "Hm.</think>Paris", "Hm."),
        ("deepseek_v31", "<think>", "Hm.</think>Paris", "Hm."),
        ("deepseek_v31", "</think>", "Paris", None),
        ("glm4_moe", "</think>", "Paris", None),
        ("think", "<think>\n", "Hm.\n</think>\nParis", "Hm."),
        ("olmo3", "<think>", "Hm.</think>Paris", "Hm."),
    ],
)
def test_the_prompt_may_open_or_close_the_thought(
    name: str, opening: str, answer: str, reasoning: str | None
) -> None:
    message = read(name, answer, opening)
    assert message == {"content": "Paris", "reasoning": reasoning or "", "calls": []}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gpt_oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>'),
        ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>'),
        ("gpt_oss", '<|channel|>analysis to=functions.f code<|message|>{"a": 1}<|end|>'),
        ("gpt_oss", ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}'),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"),
        ("glm4_moe", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>'),
        ("mistral_v11", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}</s>'),
        ("olmo3", "<function_calls>\nf(a = 1)\n</function_calls>"),
        (
            "deepseek_v31",
            '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
    ],
)
def test_other_ways_in_which_models_write_a_call(name: str, answer: str) -> None:
    ((function, arguments),) = read(name, answer)["calls"]
    assert function == "f"
    assert arguments in ({"a": 1}, {"a": "1"})


@pytest.mark.parametrize(
    "text", ['{"name": "f"}', "[]", '["f", {}]', '{"name": "f", "arguments": {}', "f(1)", "{no}"]
)
@pytest.mark.parametrize("name", ["hermes", "mistral", "olmo3", "qwen3_coder"])
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    before, after = {
        "hermes": ("<tool_call>", "</tool_call>"),
        "mistral": ("[TOOL_CALLS] ", ""),
        "olmo3": ("<function_calls>", "</function_calls>"),
        "qwen3_coder": ("<tool_call><function=f", "</function></tool_call>"),
    }[name]
    answer = before + text + after + " x"
    found = read(name, answer, as_tokens=False)
    assert found == {"content": answer, "reasoning": "", "calls": []}


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("'x'", "x"),
        ("None", None),
        ("[true, False, null]", [True, False, None]),
        ('{"a": {"b": -1.5}}', {"a": {"b": -1.5}}),
        (r'"\ud83d\ude00\n"', "😀\n"),
    ],
)
def test_values_of_pythonic_calls(value: str, right: Any) -> None:
    assert pythonic(f"a.f(x={value})", {}) == [{"name": "a.f", "arguments": {"x": right}}]


@pytest.mark.parametrize(
    "text",
    [
        "f(x=y)",
        "f(**{})",
        "f(x={[1]: 2})",
        "x = f()",
        "f(x=__import__('os'))",
        r'f(x="\ud83d")',
        f"f(x={'[' * 999})",
        "f(x=" + "-" * 99_999 + "1)",
    ],
)
def test_pythonic_takes_literals_only(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        pythonic(text, {})


def test_a_call_that_opens_in_an_unfinished_string_is_read() -> None:
    answer = '[TOOL_CALLS]f[ARGS]{"a": "x[TOOL_CALLS]g[ARGS]{"b": 1}'
    found = read("mistral_v11", answer, as_tokens=True)
    assert [call[0] for call in found["calls"]] == ["g"]
