"""An answer whose engine dies goes on with another one: each pair of a request's options, at five tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from covering import all_pairs
from eaas_cli.local.fork_server import ForkServer
from model_engines import ModelEngines
from moved_answers import MovedAnswers, Sequence, usage_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# As in conftest.py, which no test imports.
ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
OPTIONS: dict[str, Any] = {
    "arch": ARCHITECTURES,
    "api": ("chat/completions", "completions", "responses", "messages"),
    "stream": (False, True),
    "seeded": (False, True),
    "n": (1, 2),
    "guide": ("", "json", "tools"),
    "scores": (False, True),
    "stop": (False, True),
}
TEXT = "Tell me about rivers, please."
# A random model ends it soon. Its names are of more bytes than letters.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"enum": ["Łódź 🙂", "Århus 🌊"]}, "warm": {"type": "boolean"}},
    "required": ["town", "warm"],
    "additionalProperties": False,
}
MOST = 24


def allowed(case: Mapping[str, Any]) -> bool:
    """Whether an API has the options, and they go together."""
    api, guide = case["api"], case["guide"]
    return not (
        (api in ("responses", "messages") and (case["n"] > 1 or case["scores"]))
        or (api == "responses" and case["stop"])
        or (api == "messages" and case["seeded"])
        or (api == "completions" and guide)
        or (guide and case["stop"])
    )


CASES = all_pairs(OPTIONS, allowed)


def name_of(case: Mapping[str, Any]) -> str:
    words = [case["arch"], case["api"].replace("/", "-"), case["guide"]]
    words += [name for name in ("stream", "seeded", "scores", "stop") if case[name]]
    return " ".join(filter(None, [*words, "n=2" * (case["n"] > 1)]))


def body_of(case: Mapping[str, Any], stop: str) -> dict[str, Any]:
    """The request of a case, with or without a stop string."""
    api, guide = case["api"], case["guide"]
    most = 150 if guide else MOST
    body: dict[str, Any] = {"model": "tiny", "temperature": 1 if case["seeded"] else 0}
    function = {"name": "warmth", "parameters": SCHEMA}
    schema = {"type": "json_schema", "schema": SCHEMA}
    tools: Any = None
    if case["seeded"]:
        body["seed"] = 7
    if case["stream"]:
        body["stream"] = True
    if api == "responses":
        body |= {"input": TEXT, "max_output_tokens": most}
        tools = [{"type": "function", **function}], "required"
        shape: dict[str, Any] = {"text": {"format": {"name": "x", **schema}}}
    elif api == "messages":
        body |= {"messages": [{"role": "user", "content": TEXT}], "max_tokens": most}
        tools = [{"name": "warmth", "input_schema": SCHEMA}], {"type": "any"}
        shape = {"output_config": {"format": schema}}
        body |= {"stop_sequences": [stop]} if stop else {}
    else:
        is_chat = api == "chat/completions"
        asked = {"messages": [{"role": "user", "content": TEXT}]} if is_chat else {"prompt": TEXT}
        body |= asked | {"max_tokens": most, "n": case["n"]} | ({"stop": stop} if stop else {})
        tools = [{"type": "function", "function": function}], "required"
        named = {"name": "x", "schema": SCHEMA}
        shape = {"response_format": {"type": "json_schema", "json_schema": named}}
        if case["scores"]:
            body |= (
                {"logprobs": True, "top_logprobs": 5} if is_chat else {"logprobs": 5, "echo": True}
            )
        if case["stream"]:
            body["stream_options"] = {"include_usage": True}
    if guide == "json":
        body |= shape
    elif guide == "tools":
        body["tools"], body["tool_choice"] = tools
    return body


def stop_of(moved: MovedAnswers, tokens: list[int]) -> tuple[str, int]:
    """A stop string of two tokens of an answer, and the place between them."""
    for at in range(len(tokens) // 2, len(tokens)):
        text = moved.files.tokenizer.decode(tokens[at - 1 : at + 1], skip_special_tokens=True)
        if text.strip() and "\ufffd" not in text:
            return text, at
    raise AssertionError("no two tokens are a text")


@pytest.fixture(scope="module")
def engines(fork_server: ForkServer) -> Iterator[ModelEngines]:
    with ModelEngines(fork_server) as engines:
        yield engines


def check(moved: MovedAnswers, case: Mapping[str, Any], *parts: float) -> None:
    """The engine dies at these parts of the answer."""
    path = f"/v1/{case['api']}"
    moved.serve(-1)
    _, sequences = moved.ask(path, body_of(case, ""))
    tokens = sequences[0].tokens
    stop, last = stop_of(moved, tokens) if case["stop"] else ("", len(tokens) - 1)
    body = body_of(case, stop)
    for at in sorted({round(part * last) for part in parts}):
        answer, sequences = moved.ask_dying(path, body, at, exact=case["n"] == 1)
        if not stop:
            assert usage_of(answer) == sum(len(each.tokens) for each in sequences)
        check_begin(sequences, tokens, at)


def check_begin(sequences: list[Sequence], tokens: list[int], at: int) -> None:
    """The first tokens are of the engine that died."""
    first = sequences[0]
    assert first.tokens[:at] == tokens[:at]
    assert first.moved_at == ([at] if 0 < at < len(first.tokens) else [])


# The first ones have each value of each option.
@pytest.mark.parametrize("case", CASES[:6], ids=name_of)
def test_an_answer_goes_on(
    case: Mapping[str, Any], checkpoint: Callable[..., Path], engines: ModelEngines
) -> None:
    with MovedAnswers(checkpoint(case["arch"]), engines) as moved:
        check(moved, case, 0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_an_answer_goes_on_from_each_part(
    case: Mapping[str, Any],
    dtype: str,
    checkpoint: Callable[..., Path],
    engines: ModelEngines,
) -> None:
    with MovedAnswers(checkpoint(case["arch"], dtype), engines) as moved:
        check(moved, case, 0, 0.05, 0.5, 0.9, 1)
