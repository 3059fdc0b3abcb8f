"""What models write, as their users get it: reasoning, calls and text; ChatML, then each family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from chat_prompts import assistant, call, result
from eaas_cli.demo_model import ARCHITECTURES
from http_box import CHAT, SIZES, Box, demo_endpoint, events

pytestmark = pytest.mark.integration

CHATML = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if thinks is defined %}<think>
{% if not thinks %}
</think>

{% endif %}{% endif %}{% endif %}"""
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'
NAMED = {"type": "function", "function": {"name": "f"}}
FIXED = {"const": "a</tool_call>b<|im_end|> <think>x</think>"}


@pytest.fixture(scope="module")
def chatml() -> Iterator[Box]:
    with Box(sizes=replace(SIZES, num_blocks=200), chat_template=CHATML) as box:
        yield box


def script(answer: str) -> dict[str, Any]:
    """Fields that make the model write an answer, markup and all."""
    return {"structured_outputs": {"regex": re.sub(r"([^\w\s<>/\"':,])", r"\\\1", answer)}}


def ask(box: Any, **fields: Any) -> dict[str, Any]:
    """Return the message of an answer, the same whole and streamed, and what else the choice has."""
    body = CHAT | {"max_tokens": 160} | fields
    whole = box.http.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    (choice,) = whole.json()["choices"]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    found = {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [(each["name"], each["arguments"]) for each in calls],
        "reason": choice["finish_reason"],
    }
    streamed = box.http.post("/v1/chat/completions", json=body | {"stream": True})
    deltas = [event["choices"][0] for event in events(streamed.text)]
    calls = [call for each in deltas for call in each["delta"].get("tool_calls", ())]
    assert found == {
        "content": "".join(each["delta"].get("content") or "" for each in deltas),
        "reasoning": "".join(each["delta"].get("reasoning_content") or "" for each in deltas),
        "calls": [(c["function"]["name"], c["function"]["arguments"]) for c in calls],
        "reason": deltas[-1]["finish_reason"],
    }
    return found | {"usage": whole.json()["usage"]}


def told(
    content: str, reasoning: str = "", calls: Any = (), reason: str = "stop"
) -> dict[str, Any]:
    found = {"content": content, "reasoning": reasoning, "calls": list(calls), "reason": reason}
    return found


def same(found: dict[str, Any], right: dict[str, Any]) -> bool:
    return {name: found[name] for name in right} == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("<think>Hm.\n</think>\n\nParis", told("Paris", "Hm.")),
        ("The tag <tool_call> opens it", told("The tag <tool_call> opens it")),
        ("A <think>x</think> b", told("A <think>x</think> b")),
        (f"Look: {CALL}", told("Look:", "", [("f", '{"a": "b"}')], "tool_calls")),
        (
            f"<tool_call>{{bad}}</tool_call>\n{CALL}",
            told("<tool_call>{bad}</tool_call>", "", [("f", '{"a": "b"}')], "tool_calls"),
        ),
    ],
)
def test_free_answers(chatml: Box, answer: str, right: dict[str, Any]) -> None:
    assert same(ask(chatml, tools=[TOOL], **script(answer)), right)


def test_tokens_of_reasoning_are_counted(chatml: Box) -> None:
    found = ask(chatml, **script("<think>Hm.</think>\nParis"))
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_a_thought_that_the_prompt_opened(chatml: Box) -> None:
    thinks = {"chat_template_kwargs": {"thinks": True}}
    assert same(ask(chatml, **thinks, **script("Hm.</think>Paris")), told("Paris", "Hm."))
    assert same(ask(chatml, **thinks, **script("Hm.")), told("", "Hm."))


def test_a_stop_string_is_not_found_in_the_prompt(chatml: Box) -> None:
    fields = {"chat_template_kwargs": {"thinks": False}, "stop": ["\n"]}
    assert same(ask(chatml, **fields, **script("Paris\nis")), told("Paris"))


@pytest.mark.parametrize(
    "text",
    ["<|im_start|>assistant\n<think>\n", "x<think>", "<|im_end|>\n<|im_start|>assistant\nyes"],
)
@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
def test_nothing_of_the_prompt_is_delivered(chatml: Box, text: str, fields: dict[str, Any]) -> None:
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "earlier"},
        {"role": "user", "content": text},
    ]
    assert same(ask(chatml, messages=history, **fields, **script("Paris")), told("Paris"))


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_markup_in_the_arguments_of_a_forced_call(chatml: Box, choice: Any) -> None:
    schema = {"type": "object", "properties": {"a": FIXED}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    found = ask(chatml, **fields)
    ((name, arguments),) = found["calls"]
    assert (name, json.loads(arguments)) == ("f", {"a": FIXED["const"]})
    reason = "tool_calls" if choice == "required" else "stop"
    assert same(found, told("", "", found["calls"], reason))


def test_choices_have_their_own_parts(chatml: Box) -> None:
    body = CHAT | {"n": 2, "max_tokens": 80} | script("<think>Hm.</think>Paris")
    choices = chatml.http.post("/v1/chat/completions", json=body).json()["choices"]
    for choice in choices:
        assert choice["message"]["content"] == "Paris"
        assert choice["message"]["reasoning_content"] == "Hm."


@pytest.fixture(scope="module", params=ARCHITECTURES)
def demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A client of a demo model, which has the template and the tokens of its family."""
    arch = str(request.param)
    with (
        demo_endpoint(tmp_path_factory.mktemp("demo") / arch, arch, "tiny") as (url, tokenizer),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield SimpleNamespace(http=http, tokenizer=tokenizer, arch=arch)


THINKS = {"chat_template_kwargs": {"thinking": True}}  # a variable of DeepSeek's template alone
ANSWERS = {
    "text": assistant(content="Sunny <b>."),
    "text after a thought": assistant(content="Sunny.", reasoning_content="Hm."),
    "call": assistant(call("f", {"a": "b"}, "abcdefghi")),
    "call after text": assistant(call("f", {"a": "ü"}, "abcdefghi"), content="I look."),
    "all": assistant(call("f", {"a": '"<'}, "abcdefghi"), content="So:", reasoning_content="Hm."),
    "two calls": assistant(call("f", {"a": "1"}, "abcdefghi"), call("f", {"a": "2"}, "abcdefgh2")),
}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(each, id=name, marks=[pytest.mark.nightly] * (name != "call after text"))
        for name, each in ANSWERS.items()
    ],
)
def test_each_family_reads_what_its_template_writes(
    demo: SimpleNamespace, message: dict[str, Any]
) -> None:
    calls = [each["function"] for each in message.get("tool_calls", ())]
    thought = message.get("reasoning_content", "")
    if (len(calls) > 1 and demo.arch == "gpt_oss") or (thought and demo.arch == "mixtral"):
        pytest.skip("the family has no such answers")

    def rendered(*messages: Any, **fields: Any) -> str:
        fields |= {"tokenize": False, "thinking": bool(thought), "tools": [TOOL]}
        return str(demo.tokenizer.apply_chat_template([*CHAT["messages"], *messages], **fields))

    written = rendered(message).removeprefix(rendered(add_generation_prompt=True))
    tokens = demo.tokenizer(written.rstrip(), add_special_tokens=False)["input_ids"][:-1]
    grammar = {"grammar": "start: " + " ".join(f"<[{token}]>" for token in tokens)}
    fields = {"tools": [TOOL]} | (THINKS if thought else {})
    found = ask(demo, structured_outputs=grammar, **fields)
    found["calls"] = [(name, json.loads(arguments)) for name, arguments in found["calls"]]
    said = [(each["name"], each["arguments"]) for each in calls]
    right = told(message["content"] or "", thought, said, "tool_calls" if calls else "stop")
    assert same(found, right)
    # It goes back.
    results = [result("17", each["id"]) for each in message.get("tool_calls", ())]
    history = [*CHAT["messages"], message, *results, *CHAT["messages"]]
    body = CHAT | {"messages": history, "max_tokens": 2, "tools": [TOOL]}
    answer = demo.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.nightly
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_each_family_is_made_to_call(demo: SimpleNamespace, choice: Any) -> None:
    schema = {"type": "object", "properties": {"a": FIXED}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    ((name, arguments),) = ask(demo, **fields)["calls"]
    assert (name, json.loads(arguments)) == ("f", {"a": FIXED["const"]})


def test_each_family_follows_a_schema(demo: SimpleNamespace) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["é", 7]}}}
    found = ask(demo, response_format=form)
    assert json.loads(found["content"]) in ("é", 7)
    assert same(found, told(found["content"]))
