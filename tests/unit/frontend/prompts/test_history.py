"""What clients send back reaches the prompt, whole, in the form that the model's chat template demands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chat_prompts import assistant, call, prompt, result
from eaas.generation.errors import ApiError
from frontend.prompts.bodies import ChatRequest, TokenizeRequest

USER = {"role": "user", "content": "How warm is it?"}
AGAIN = {"role": "user", "content": "Try again."}
TOOL = {"type": "function", "function": {"name": "now", "description": "The time."}}

BAR = "\uff5c"  # DeepSeek's

TEXT, SO = {"type": "text", "text": "a"}, {"type": "text", "text": "So."}
FIELDS = "fields"  # shows each field that a message may have


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (assistant(content="Lima.", tool_calls=[]), "[assistant] Lima. ;"),
        (USER | {"tool_calls": []}, "[user] How warm is it? ;"),
        (assistant(content="Lima.", tool_calls=None, refusal=None), "[assistant] Lima. ;"),
        (assistant(call("f", '{"a": 1}'), content="Look."), 'Look. call f {"a": 1} ;'),
        (assistant(call("f", "")), "[assistant]  call f {} ;"),
        (assistant(call("f", " \n")), " call f {} ;"),
        (assistant(call("f", None)), " call f {} ;"),
        (assistant(call("f", "null")), " call f {} ;"),
        (assistant({"function": {"name": "f"}}), " call f {} ;"),
        (assistant(call("f", {"a": ["é"]})), ' call f {"a": ["é"]} ;'),
        (assistant(call("f", '{"a": "The river beg')), r' call f "{\"a\": \"The river beg" ;'),
        (assistant(call("f", "[1, 2]")), ' call f "[1, 2]" ;'),
        (assistant(call("f", '{"a": "\\ud800"}')), r' call f "{\"a\": \"\\ud800\"}" ;'),
        (assistant(call("f", "[" * 5000)), f' call f "{"[" * 5000}" ;'),
        (assistant(content="Hm.", reasoning_content="So."), "(thought: So.) Hm. ;"),
        (assistant(content="Hm.", reasoning="So."), "(thought: So.) Hm. ;"),
        (assistant(content="Hm.", thinking="So."), "(thought: So.) Hm. ;"),
        (assistant(content="Hm.", reasoning="So.", reasoning_content="So."), "(thought: So.) Hm."),
        (assistant(content=None), "[assistant]  ;"),
        ({"role": "assistant"}, "[assistant]  ;"),
        ({"role": "user", "content": None}, "[user]  ;"),
        (assistant(content=None, refusal="I may not."), "[assistant] I may not. ;"),
        (USER | {"name": "Ana"}, "[user name=Ana] How"),
        (assistant(function_call={"name": "f", "arguments": '{"a": 1}'}), ' call f {"a": 1} ;'),
        ({"role": "developer", "content": "Be kind."}, "[system] Be kind. ;"),
        # Parts of a content.
        (assistant(content=[{"type": "text", "text": "# A\n- b"}, TEXT]), "] # A\n- b\na ;"),
        (assistant(content=[{"type": "input_text", "text": "a"}, "b"]), "] a\nb ;"),
        (assistant(content=[{"type": "output_text", "text": "a", "annotations": []}]), "] a ;"),
        (assistant(content=[{"type": "refusal", "refusal": "No."}]), "] No. ;"),
        (assistant(content=[{"type": "thinking", "thinking": "So."}, TEXT]), "So.) a ;"),
        (assistant(content=[{"type": "thinking", "thinking": [SO]}, "a"]), "(thought: So.) a ;"),
        (assistant(content=[{"type": "reasoning", "text": "So."}, "a"]), "(thought: So.) a ;"),
        (assistant(content=[{"type": "reasoning", "summary": [SO]}, "a"]), "(thought: So.) a ;"),
        (assistant(content=[]), "[assistant]  ;"),
    ],
)
def test_all_of_a_message_is_in_the_prompt(message: Any, shown: str) -> None:
    for cls in (ChatRequest, TokenizeRequest):
        assert shown in prompt(FIELDS, message, USER, cls=cls)


def test_results_and_the_older_form_of_a_call() -> None:
    text = prompt(
        FIELDS,
        assistant(function_call={"name": "f", "arguments": "{}"}),
        {"role": "function", "name": "f", "content": "17"},
        assistant(call("g", "{}")),
        result([{"type": "text", "text": "18"}], name="g"),
    )
    assert " call f {} ; [tool name=f] 17 ;" in text
    assert " call g {} ; [tool name=g] 18 ;" in text


WEATHER = (
    USER,
    assistant(
        call("warmth", '{"town":  "Quito"}', "a" * 50),
        call("wind", '{"town": "Lim', "b"),
        content="I look.",
        reasoning_content="Two calls.",
    ),
    result("17", "b"),
    result("18 °C", "a" * 50),
    assistant(content="Warm."),
    AGAIN,
    assistant(call("warmth", "", None)),
    result("19", None),
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("qwen3", ['"warmth", "arguments": {"town": "Quito"}}', '"arguments": {"town": "Lim}']),
        ("qwen3_coder", ["<parameter=town>\nQuito\n", '<parameter=arguments>\n{"town": "Lim\n']),
        (
            "gpt_oss",
            [
                "final<|message|>I look.<|end|>",
                '{"town": "Quito"}<|call|><|start|>functions.warmth to=assistant<|channel|>'
                'commentary<|message|>"18 °C"',
                '"{\\"town\\": \\"Lim"<|call|><|start|>functions.wind to=assistant',
            ],
        ),
        (
            "deepseek_r1",
            ["I look.<", 'warmth\n```json\n{"town":  "Quito"}\n', '{"town": "Lim\n'],
        ),
        (
            "deepseek_v3",
            [f"I look.<{BAR}tool▁calls▁begin{BAR}>", '{"town":  "Quito"}', '{"town": "Lim\n'],
        ),
        (
            "deepseek_v31",
            [f"I look.<{BAR}tool▁calls▁begin{BAR}>", f'<{BAR}tool▁sep{BAR}>{{"town":  "Quito"}}<'],
        ),
        (
            "kimi_k2",
            [
                'functions.warmth:0<|tool_call_argument_begin|>{"town": "Quito"}',
                "## Return of functions.wind:1\n17",
                "## Return of functions.warmth:0\n18",
                "## Return of functions.warmth:2\n19",
            ],
        ),
        ("mistral", [" I look.\nWarm.</s>", '{"town": "Quito"}, "id": "']),
        ("mistral_small", ["I look.[TOOL_CALLS]warmth[CALL_ID]", '[ARGS]{"town": "Quito"}']),
        ("olmo3", ['warmth(town="Quito")\n', r'wind(arguments="{\"town\": \"Lim")', "warmth()"]),
        ("mixtral", ['I look.\n[{"name": "warmth", "parameters": {"town": "Quito"}}']),
        ("olmoe", ["<|user|>\n<tool_response>\n17\n</tool_response>\n<tool_response>\n18"]),
    ],
)
def test_each_template_gets_what_it_demands(template: str, shown: list[str]) -> None:
    text = prompt(template, *WEATHER, tools=[TOOL], tool_choice="required")
    for each in (*shown, "I look.", "17", "18 °C", "Warm.", "19", "Try again."):
        assert each in text


@pytest.mark.parametrize("template", ["mistral", "mistral_small"])
def test_ids_of_a_call_and_its_result_stay_the_same(template: str) -> None:
    sent = ("Ab3456789", "call_0123456789", "chatcmpl-tool-" + "7" * 30)
    calls = (call(f"f{at}", "{}", id) for at, id in enumerate(sent))
    text = prompt(template, USER, assistant(*calls), *(result("r", id) for id in sent))
    assert text.count("Ab3456789") == 2
    assert not any(id in text for id in sent[1:])


def test_ids_are_kept_where_the_template_takes_any() -> None:
    template = (
        "{% for m in messages %}{{ m.content }} {% for c in m.tool_calls %}<{{ c.id }}>"
        "{{ c.function | tojson }}{% endfor %}{{ m.tool_call_id }}|{% endfor %}"
    )
    text = prompt(template, USER, assistant(call("f", "{}", "call_0123")), result("r", "call_0123"))
    assert "<call_0123>" in text
    assert "r call_0123|" in text
    text = prompt(template, USER, assistant(call("f", "{}", "x" * 41)), result("r", "x" * 41))
    assert "x" * 41 not in text


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_tool_without_parameters(parameters: dict[str, Any]) -> None:
    template = (
        "{% for t in tools %}tool {{ t.function.name }}("
        "{% for name, kind in t.function.parameters.properties.items() %}{{ name }}{% endfor %})"
        "{% endfor %}{{ messages[0].content }}"
    )
    tool = {"type": "function", "function": {"name": "now"} | parameters}
    for cls in (ChatRequest, TokenizeRequest):
        assert prompt(template, USER, tools=[tool], cls=cls).startswith("tool now()")


def test_tools_need_a_template_that_has_some() -> None:
    for template in ("qwen3", "gpt_oss", "kimi_k2"):
        assert "now" in prompt(template, USER, tools=[TOOL])
    with pytest.raises(ApiError, match="chat template has no tools"):
        prompt("mixtral", USER, tools=[TOOL])
    assert prompt("mixtral", USER, tools=[TOOL], tool_choice="required")


@pytest.mark.parametrize("cls", [ChatRequest, TokenizeRequest])
def test_effort_and_documents_are_variables_of_the_template(cls: Any) -> None:
    template = (
        "{{ reasoning_effort }}/{{ enable_thinking }}/{{ (documents or [{}])[0].title }}"
        "{{ messages[0].role }}"
    )
    documents = [{"title": "Rivers", "text": "They flow."}]
    assert prompt(template, USER, cls=cls, documents=[], reasoning_effort=None) == "//user"
    fields = {"documents": documents, "reasoning_effort": "low"}
    assert prompt(template, USER, cls=cls, **fields) == "low/True/Riversuser"
    fields |= {"reasoning_effort": "none", "chat_template_kwargs": {"reasoning_effort": "x"}}
    assert prompt(template, USER, cls=cls, **fields) == "x/False/Riversuser"
    with pytest.raises(ApiError, match="chat template has no documents"):
        prompt("qwen3", USER, cls=cls, documents=documents)


def test_what_a_template_cannot_be_told_is_named() -> None:
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [
            {"role": "user", "content": [cached, cached | {"cache_control": None}], "odd": 1},
            assistant(call("f", "{}") | {"index": 0, "extra_content": {"google": 1}}, content="b"),
            assistant(content="b", annotations=[], audio=None, function_call=None, refusal=None),
        ],
        "tools": [TOOL | {"cache_control": {"type": "ephemeral"}}],
    }
    request = ChatRequest.read(body)
    assert request.ignored == (
        "tools[0].cache_control",
        "messages[0].odd",
        "messages[0].content[0].cache_control",
        "messages[1].tool_calls[0].extra_content",
    )
    request = ChatRequest.read({"messages": [USER | {"odd": 1}] * 1000})
    assert len(request.ignored) == 16


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0]"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[0]"),
        (assistant(call("f", {"a": json.loads("[" * 150 + "]" * 150)})), "messages[0].tool_calls"),
        (assistant({"function": {"arguments": "{}"}}), "messages[0].tool_calls[0].function.name"),
        (assistant(content=[{"type": "image_url"}]), "messages[0].content"),
        (assistant(content=[{"type": "refusal"}]), "messages[0].content"),
    ],
)
def test_what_is_no_message_is_refused(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        prompt(FIELDS, message)
    assert refused.value.status == 400
    assert (refused.value.param or "").startswith(param)
