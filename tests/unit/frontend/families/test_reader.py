"""Answers are split into reasoning, calls and text by what the request allows; nothing else is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from byte_tokenizer import byte_tokenizer
from eaas.errors import ConfigError
from family_answers import family_tokenizer, merged, pieces_of
from frontend.families.family import CallFormat, Family
from frontend.families.markup import NO_MARKUP, Markup
from frontend.families.reader import AnswerReader, Calls

PROMPT = "<|im_start|>assistant\n"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
NAMELESS = '{"name": "", "arguments": {}}'
ONE = [("f", '{"a": 1}')]

HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


def read(
    answer: str, family: str = "hermes", *, as_tokens: bool = True, **reading: Any
) -> dict[str, Any]:
    tokenizer, markup = family_tokenizer(family, as_tokens=as_tokens)
    reader = AnswerReader(markup, **{"calls": Calls.ANYWHERE} | reading)
    return merged(pieces_of(reader, tokenizer, markup, tokenizer(answer)["input_ids"]))


def text(content: str, reasoning: str = "", calls: list[Any] | None = None) -> dict[str, Any]:
    return {"content": content, "reasoning": reasoning, "calls": calls or []}


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (f"Look.\n{CALL}", text("Look.", "", ONE)),
        (f"{CALL}\n{CALL}\n", text("", "", ONE * 2)),
        (f"<think>\nHm.\n</think>\n\nSo.{CALL}", text("So.", "Hm.", ONE)),
        (f"{CALL} done", text("done", "", ONE)),
        ("The tag <tool_call> opens a call.", text("The tag <tool_call> opens a call.")),
        ("A <think>x</think> b", text("A <think>x</think> b")),
        ("x</think>y", text("x</think>y")),
        (f"<tool_call>{{bad}}</tool_call>\n{CALL}", text("<tool_call>{bad}</tool_call>", "", ONE)),
        (f'<tool_call>{{"a</tool_call>{CALL}', text('<tool_call>{"a</tool_call>', "", ONE)),
        (f"{CALL}\n<tool_call>{{bad}}</tool_call>", text("<tool_call>{bad}</tool_call>", "", ONE)),
        ('<tool_call>{"name": "f"}</tool_call>', text('<tool_call>{"name": "f"}</tool_call>')),
        (f"<tool_call>{NAMELESS}</tool_call>", text(f"<tool_call>{NAMELESS}</tool_call>")),
        (
            f"<tool_call>[{CALL[11:-12]}]</tool_call>",
            text(f"<tool_call>[{CALL[11:-12]}]</tool_call>"),
        ),
        ('<tool_call>{"name": "f", "argu', text('<tool_call>{"name": "f", "argu')),
        (CALL[: -len("</tool_call>")], text("", "", ONE)),
        (f"<think>\nI call.\n{CALL}", text("", "I call.", ONE)),
        (f"<think>I may {CALL} so.</think>Done.", text("Done.", f"I may {CALL} so.")),
        ("<think>a <tool_call>b", text("<tool_call>b", "a")),
        ("  indented", text("  indented")),
        ("<think>\n", text("")),
        ("<think></think>", text("")),
        ("<thi", text("<thi")),
        ("", text("")),
    ],
)
def test_answers(answer: str, right: dict[str, Any], as_tokens: bool) -> None:
    assert read(answer, as_tokens=as_tokens) == right


@pytest.mark.parametrize("as_tokens", [True, False])
def test_the_markup_of_a_call_in_its_arguments(as_tokens: bool) -> None:
    tokenizer, markup = family_tokenizer("hermes", as_tokens=as_tokens)
    reader = AnswerReader(markup, calls=Calls.ANYWHERE)
    arguments = json.dumps({"a": "x</tool_call>y"})
    letters = byte_tokenizer()(f'{{"name": "f", "arguments": {arguments}}}')["input_ids"]
    delimiters = [tokenizer(text)["input_ids"] for text in ("<tool_call>", "</tool_call>")]
    tokens = [*delimiters[0], *letters, *delimiters[1]]
    assert merged(pieces_of(reader, tokenizer, markup, tokens)) == text("", "", [("f", arguments)])


def test_letters_of_markup_are_text_where_the_markup_is_tokens() -> None:
    tokenizer, markup = family_tokenizer("hermes")
    for answer in (CALL, "<think>x</think>y"):
        tokens = byte_tokenizer()(answer)["input_ids"]
        reader = AnswerReader(markup, calls=Calls.ANYWHERE)
        assert merged(pieces_of(reader, tokenizer, markup, tokens)) == text(answer)


OPENED = f"{PROMPT}<think>\n"
CLOSED = f"{PROMPT}<think>\n\n</think>\n\n"
CONTENT, NO_TOOLS = {"is_content": True}, {"calls": Calls.NEVER}
INSTEAD = {"calls": Calls.INSTEAD}
CONTINUED = {"continues": True}


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize(
    ("reading", "answer", "right"),
    [
        # Without tools a call is text.
        *(
            (NO_TOOLS, each, text(each))
            for each in (CALL, f"Look. {CALL}", f"<tool_call>x</tool_call>{CALL}", "<tool_call>")
        ),
        # Nothing in constrained text is markup.
        *(
            (reading, reason + each, text(each, thought))
            for each in (f'{{"a": "{CALL}"}}', '"<think>x</think>"', "<think>x</think>")
            for reading, reason, thought in (
                (CONTENT, "", ""),
                (CONTENT | {"opening": OPENED}, "Hm.</think>\n", "Hm."),
            )
        ),
        (INSTEAD, CALL, text("", "", ONE)),
        (INSTEAD, f'{{"a": "{CALL}"}}', text(f'{{"a": "{CALL}"}}')),
        # The prompt opens or closes the thought.
        ({"opening": OPENED}, "Hm.\n</think>\n\nSo.", text("So.", "Hm.")),
        ({"opening": OPENED}, "Hm.", text("", "Hm.")),
        ({"opening": CLOSED}, "\n\nSo.", text("\n\nSo.")),
        ({"opening": CLOSED}, "<think>x</think>", text("<think>x</think>")),
        ({"opening": f"{PROMPT}</think>"}, "So.", text("So.")),
        ({"opening": PROMPT}, "So.", text("So.")),
        # A call comes after a tag that opens none.
        ({}, f"The tag <tool_call>: {CALL}", text("The tag <tool_call>:", "", ONE)),
        ({}, f"<tool_call><tool_call>{{{CALL}", text("<tool_call><tool_call>{", "", ONE)),
        ({}, f"<tool_call>{CALL}", text("<tool_call>", "", ONE)),
        # A continued answer does not begin.
        (CONTINUED | {"opening": "So "}, "<think>x</think>y", text("<think>x</think>y")),
        (CONTINUED | {"opening": "<think>a"}, "b</think>y", text("y", "b")),
    ],
)
def test_readings(
    reading: dict[str, Any], answer: str, right: dict[str, Any], as_tokens: bool
) -> None:
    assert read(answer, as_tokens=as_tokens, **reading) == right


@pytest.mark.parametrize(
    ("answer", "count"), [("<think>abc</think>de", 3), ("abc", 0), ("<think>ab", 2)]
)
def test_tokens_of_reasoning_are_counted(answer: str, count: int) -> None:
    for as_tokens in (True, False):
        tokenizer, markup = family_tokenizer("hermes", as_tokens=as_tokens)
        reader = AnswerReader(markup)
        pieces_of(reader, tokenizer, markup, tokenizer(answer)["input_ids"])
        assert reader.reasoning_tokens == count


TAGS = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
INVOKED = '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'
BETWEEN = '"<｜tool▁calls▁end｜><｜tool▁call▁begin｜>function"'
FINAL = (
    "<|start|>assistant<|channel|>analysis<|message|>More.<|end|><|start|>assistant"
    "<|channel|>final<|message|>So."
)


def forced(form: str) -> dict[str, Any]:
    return {"forced": CallFormat(form), "tools": {"f": {}}}


@pytest.mark.parametrize(
    ("family", "reading", "answer", "right"),
    [
        ("gpt_oss", {}, HARMONY, text("I look.", "Hm.", ONE)),
        ("gpt_oss", {}, HARMONY + FINAL, text("I look.\nSo.", "Hm.\nMore.", ONE)),
        ("gpt_oss", {}, "Plain.", text("Plain.")),
        # Tags around a call are markup.
        ("qwen3_coder", {}, f"{TAGS}\n{TAGS}\n", text("", "", [("f", "{}")] * 2)),
        ("qwen3_coder", {"as_tokens": False}, f"{TAGS}\n", text("", "", [("f", "{}")])),
        ("minimax_m2", {}, f"{INVOKED} So.", text("So.", "", [("f", "{}")])),
        # A grammar makes the answer text.
        *(
            ("deepseek_v3", reading, each, text(each))
            for reading in (CONTENT, INSTEAD)
            for each in (BETWEEN, BETWEEN[:-1])
        ),
        # Calls that are cut off.
        ("deepseek_v3", NO_TOOLS, "a<｜tool▁call▁begin｜>f", text("a<｜tool▁call▁begin｜>f")),
        ("deepseek_v3", {}, "a<｜tool▁call▁begin｜>f", text("a")),
        (
            "mistral_v11",
            forced("[TOOL_CALLS]{name}[ARGS]{arguments}"),
            "[TOOL_CALLS]f[ARGS]",
            text("f"),
        ),
        *(
            ("minimax_m2", forced("{arguments}"), each, text("", "", [("f", each)]))
            for each in ('{"x": "a <minimax:tool_call>', '{"x": "a <minimax:tool_call><invo')
        ),
    ],
)
def test_other_families(
    family: str, reading: dict[str, Any], answer: str, right: dict[str, Any]
) -> None:
    assert read(answer, family, **reading) == right


def test_ids_that_a_template_demands() -> None:
    tokenizer, markup = family_tokenizer("kimi_k2")
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    answer = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    reader = AnswerReader(markup, calls=Calls.ANYWHERE, earlier=3)
    pieces = pieces_of(reader, tokenizer, markup, tokenizer(answer)["input_ids"])
    assert [piece.id for piece in pieces] == ["functions.f:3", "functions.f:4"]


def test_values_have_the_types_of_the_schema() -> None:
    answer = (
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\n1\n</parameter>\n"
        "<parameter=l>\n[1]\n</parameter>\n</function>\n</tool_call>"
    )
    kinds = {"n": "integer", "s": "string", "l": "array"}
    schema = {"properties": {name: {"type": kind} for name, kind in kinds.items()}}
    ((_, arguments),) = read(answer, "qwen3_coder", tools={"f": schema})["calls"]
    assert json.loads(arguments) == {"n": 1, "s": "1", "l": [1]}


def test_the_family_that_fits() -> None:
    plain = byte_tokenizer("<end>", eos_token="<end>")
    assert Family.of(plain) is None
    for template, name in (
        ("{{ '<|im_start|>' }}", "hermes"),
        ("{{ '<|im_start|>' }}<function=", "qwen3_coder"),
        ("[assistant]<think>", "think"),
    ):
        plain.chat_template = template
        found = Family.of(plain)
        assert found is not None
        assert found.name == name
    plain.chat_template = None
    plain.add_tokens(["<|start|>", "<|channel|>", "<|message|>"])
    assert getattr(Family.of(plain), "name", None) == "gpt_oss"


def test_a_family_by_name_or_file(tmp_path: Any) -> None:
    plain = byte_tokenizer("<end>", eos_token="<end>")
    assert getattr(Family.of(plain, "kimi_k2"), "name", None) == "kimi_k2"
    file = tmp_path / "own.json"
    with pytest.raises(ConfigError, match="no family"):
        Family.of(plain, str(file))
    for wrong in ("", "[]", "{}", '{"response_template": {"fields": {}}}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"own\.json"):
            Family.of(plain, str(file))
    fields = {"reasoning_content": {"open": "<t>", "close": "</t>"}, "content": {}}
    file.write_text(json.dumps({"response_template": {"start_anchor": "x", "fields": fields}}))
    markup = Markup(Family.of(plain, str(file)), plain)
    found = [*(reader := AnswerReader(markup)).push("<t>a</t>b"), *reader.finish()]
    assert merged(found) == text("b", "a")


def test_text_without_markup_is_unchanged() -> None:
    reader = AnswerReader(NO_MARKUP)
    assert [*reader.push(" <think>"), *reader.push(CALL), *reader.finish()] == [" <think>", CALL]
