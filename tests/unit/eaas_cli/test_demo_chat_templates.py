"""Chat templates of the demo models: tools and reasoning in the form of each architecture's family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eaas_cli.demo_model.architectures import ARCHITECTURES
from eaas_cli.demo_model.tokenizer import MIN_VOCAB, build_tokenizer, end_ids
from family_answers import merged, pieces_of
from frontend.families.family import Family
from frontend.families.markup import Markup
from frontend.families.reader import AnswerReader, Calls

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Use {name}.", "parameters": PARAMETERS},
    }
    for name in ("get_weather", "get_time")
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How is it in Zürich?"}
CALLS: list[tuple[str, Any]] = [("get_weather", {"city": "Zürich"}), ("get_time", {})]


def call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "abcdefghi", "name": "get_weather"}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(arch: str) -> Any:
    return build_tokenizer(1000, 4096, arch)


def render(tokenizer: Any, messages: list[dict[str, Any]], **arguments: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))


def test_each_part_of_a_dialogue_is_in_the_prompt(tokenizer: Any) -> None:
    assistant = {"role": "assistant", "content": "I look.", "tool_calls": [call(*CALLS[0])]}
    messages = [SYSTEM, USER, assistant, result("Föhn, 18 C"), USER | {"content": "And now?"}]
    prompt = render(tokenizer, messages, tools=TOOLS, add_generation_prompt=True)
    for text in ("Be brief.", "Use get_weather.", "Use get_time.", "Zürich?", "I look."):
        assert prompt.count(text) == 1, text
    assert prompt.index("I look.") < prompt.index("Föhn, 18 C") < prompt.index("And now?")
    without = render(tokenizer, [SYSTEM, USER, USER], add_generation_prompt=True)
    assert without.count("Zürich?") == 2
    assert "get_weather" not in without
    assert "None" not in prompt + without


@pytest.mark.parametrize("content", ["I look.", "", None])
@pytest.mark.parametrize("count", [1, 2])
def test_an_earlier_answer_reads_as_the_family_writes_it(
    tokenizer: Any, content: str | None, count: int
) -> None:
    markup = Markup(Family.of(tokenizer), tokenizer)
    thinks = markup.reasoning is not None
    message = {
        "role": "assistant",
        "content": content,
        **({"reasoning_content": "Hm."} if thinks else {}),
        "tool_calls": [call(*each) for each in CALLS[:count]],
    }
    before = render(tokenizer, [USER])
    whole = render(tokenizer, [USER, message])
    assert whole.startswith(before)
    opening = re.compile(r"<\|im_start\|>assistant\n|<\|start\|>assistant|<｜Assistant｜>|")
    answer = opening.sub("", whole[len(before) :], count=1)
    answer = answer.rstrip().removesuffix(tokenizer.eos_token)
    reader = AnswerReader(markup, opening="", calls=Calls.ANYWHERE)
    read = merged(pieces_of(reader, tokenizer, markup, tokenizer.encode(answer)))
    calls = [(name, json.loads(arguments)) for name, arguments in read.pop("calls")]
    assert calls == CALLS[:count]
    assert read == {"content": content or "", "reasoning": "Hm." if thinks else ""}


def test_arguments_that_are_text_stay_as_they_are(tokenizer: Any) -> None:
    for text in ('{"city": "Bern"', "", "city: Bern"):
        message = {"role": "assistant", "content": None, "tool_calls": [call("get_time", text)]}
        assert text in render(tokenizer, [USER, message, result("x")])


def test_a_small_vocabulary_still_holds_every_byte(arch: str) -> None:
    tokenizer = build_tokenizer(MIN_VOCAB, 4096, arch)
    assert len(tokenizer) == MIN_VOCAB
    text = "Föhn <tool_call> [TOOL_CALLS] 河"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_harmony_ends_an_answer_at_a_call_and_has_an_effort_of_reasoning() -> None:
    tokenizer = build_tokenizer(1000, 4096, "gpt_oss")
    ends = tokenizer.convert_ids_to_tokens(end_ids(tokenizer, "gpt_oss"))
    assert ends == ["<|return|>", "<|call|>"]
    assert "Reasoning: high" in render(tokenizer, [USER], reasoning_effort="high")


@pytest.mark.parametrize(
    ("arch", "variables", "end"),
    [
        ("qwen3_moe", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("deepseek_v3", {"thinking": True}, "<think>"),
        ("deepseek_v3", {}, "</think>"),
    ],
)
def test_a_thought_may_be_opened_or_closed(arch: str, variables: dict[str, Any], end: str) -> None:
    tokenizer = build_tokenizer(1000, 4096, arch)
    prompt = render(tokenizer, [USER], add_generation_prompt=True, **variables)
    assert prompt.endswith(end)


def test_the_trained_demo_continues_messages_and_has_tools() -> None:
    demo = Path(__file__).parents[3] / "examples" / "demo"
    tokenizer = AutoTokenizer.from_pretrained(demo, local_files_only=True)
    answer = {"role": "assistant", "content": None, "tool_calls": [call(*CALLS[0])]}
    messages = [SYSTEM, USER, answer, result("Föhn")]
    plain = render(tokenizer, messages, add_generation_prompt=True)
    assert plain == "Be brief.\nHow is it in Zürich?\nFöhn"
    chat = build_tokenizer(1000, 4096, "qwen3_moe")
    assert render(tokenizer, messages, tools=TOOLS) == render(chat, messages, tools=TOOLS)
