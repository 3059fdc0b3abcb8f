"""Histories that clients may send back, against the templates of each family: nothing of them is erased."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from chat_prompts import TEMPLATES, call, prompt, result
from eaas.generation.errors import ApiError

TOOL = {"type": "function", "function": {"name": "now", "description": "The time."}}
TEXTS = ["", " ", "a\nb", '{"', "'", "None", "</s>", "é°", "<tool_call>", "```"]


@st.composite
def histories(draw: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages that a client may send back, and words that must be in the prompt."""
    words: list[str] = []

    def word() -> str:
        words.append(f"word{len(words):03}")
        return words[-1]

    def text() -> str:
        if not draw(st.booleans()):
            return ""
        around = st.sampled_from(TEXTS)
        return draw(around) + word() + draw(around)

    def content() -> Any:
        kind = draw(st.sampled_from(["text", "null", "parts", "empty"]))
        if kind == "parts":
            kinds = draw(
                st.lists(st.sampled_from(["text", "input_text", "output_text"]), max_size=3)
            )
            return [{"type": each, "text": text()} for each in kinds]
        return {"text": text, "null": lambda: None, "empty": lambda: ""}[kind]()

    def arguments() -> Any:
        whole = json.dumps({word(): word(), "n": [1.5, None, {}]})
        forms: list[Callable[[], Any]] = [
            lambda: whole,
            lambda: json.loads(whole),
            lambda: whole[: -draw(st.integers(1, 8))],
            lambda: f'["{word()}"]',
            lambda: word(),
        ]
        empty = [lambda: "", lambda: "  ", lambda: None, lambda: "null", lambda: "{}", dict]
        if draw(st.integers(0, 9)) == 0:
            del words[-2:]
            return draw(st.sampled_from(empty))()
        form = draw(st.sampled_from(forms))
        if form in forms[3:]:
            del words[-2:]
        return form()

    ids = st.sampled_from([None, "", "abcdefghi", "call_0", "functions.f:0", "x" * 60, "日本" * 9])
    messages: list[dict[str, Any]] = []
    for role in draw(
        st.lists(st.sampled_from(["user", "assistant", "calls", "system"]), max_size=6)
    ):
        if role != "calls":
            messages.append({"role": role, "content": content()})
            if role == "assistant" and draw(st.booleans()):
                messages[-1] |= {"reasoning_content": "thought", "tool_calls": []}
            continue
        calls = [call(word(), arguments(), draw(ids)) for _ in range(draw(st.integers(1, 3)))]
        messages.append({"role": "assistant", "content": content(), "tool_calls": calls})
        if draw(st.booleans()):
            messages[-1]["reasoning"] = "thought"
        answers = draw(st.permutations(calls)) if draw(st.booleans()) else calls
        messages += [result(content(), each["id"]) for each in answers]
    return [*messages, {"role": "user", "content": word()}], words


# Templates that refuse orders of roles that their model never saw.
STRICT = {"mistral", "mixtral", "mistral_small"}


def test_nothing_is_erased(budget: Callable[..., hypothesis.settings]) -> None:
    @budget(200)
    @given(history=histories(), tools=st.booleans())
    def check(history: tuple[list[dict[str, Any]], list[str]], tools: bool) -> None:
        messages, words = history
        fields = {"tools": [TOOL], "tool_choice": "required"} if tools else {}
        for template in TEMPLATES:
            try:
                text = prompt(template, *messages, **fields)
            except ApiError as refusal:
                if template in STRICT and "template refuses these messages: " in refusal.message:
                    continue
                raise
            assert [word for word in words if word not in text] == [], template

    check()
