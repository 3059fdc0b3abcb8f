"""Random answers of each family to random requests: nothing is lost, added, or read as what it is not."""

from __future__ import annotations

import json
import re
from functools import cache
from random import Random
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aligned_answer import Alignment, joined
from family_answers import FAMILIES, markup_texts
from frontend.families.family import BARE, JSON_LIST, CallFormat
from frontend.families.reader import Reasoning
from frontend.prompts.bodies import ChatRequest
from frontend.prompts.body import parse
from random_answers import family_pieces, read

# 100,000 answers each night.
ANSWERS = 8_400 if hypothesis.settings.default.max_examples >= 1000 else 60
NAMES = ("f", "fg")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
ARGUMENTS = {"a": '1 "{}]', "b": "</tool_call>"}
XML = {
    "glm4_moe": "<tool_call>{name}\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "minimax_m2": '<invoke name="{name}">\n<parameter name="a">1</parameter>\n</invoke>',
    "qwen3_coder": "<tool_call>\n<function={name}>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "olmo3": '<function_calls>\n{name}(a="1", b=[None])\n</function_calls>',
}
THOUGHTS = {
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "mistral_v11": ("[THINK]", "[/THINK]"),
    "mistral": None,
}
# What follows decides whether these write a call.
OPEN_ENDED = ("mistral", "mistral_v11")
PROMPT = "prompt: "

Part = tuple[str, bool]
"""Text, and whether the markup in it is tokens."""


def call_format(family: str) -> CallFormat | None:
    call = FAMILIES[family].get("call")
    return None if call is None else CallFormat(**call)


def calls_text(family: str, *names: str) -> str:
    """Return calls as a family writes them."""
    form = call_format(family)
    if form is None:
        return "\n".join(XML[family].replace("{name}", name) for name in names)
    each = [
        form.text.replace("{name}", name)
        .replace("{index}", "0")
        .replace("{arguments}", json.dumps(ARGUMENTS))
        for name in names
    ]
    return form.start + form.separator.join(each) + form.end


@cache
def parts(family: str) -> st.SearchStrategy[list[Part]]:
    """Parts of a free answer."""
    texts = [
        *"ab \n{}[]\"'<",
        "é",
        "😀",
        "STOP",
        "ST",
        "<think>",
        "<end>",
        "<pad>",
        *markup_texts(family),
    ]
    if thought := THOUGHTS.get(family, ("<think>", "</think>")):
        texts += [*thought, f"{thought[0]}\nHm.\n{thought[1]}\n\n"]
    if family != "think":
        whole = calls_text(family, "f")
        texts += [
            whole,
            calls_text(family, "f", "fg"),
            whole.replace('"', "", 1),
            whole.replace("f", "", 1),
        ]
        texts += [whole[: len(whole) * share // 4] for share in (1, 2, 3)]
        texts += [whole[len(whole) * share // 4 :] for share in (1, 2, 3)]
    if family == "gpt_oss":
        texts += [
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|><|start|>assistant",
        ]
    choices = [(text, tokens) for text in dict.fromkeys(texts) for tokens in (True, False)]
    return st.lists(st.sampled_from(choices), max_size=8)


def opening_of(family: str, kind: str) -> str:
    """Return the end of a prompt that opens a thought, closes one, or neither."""
    thought = THOUGHTS.get(family, ("<think>", "</think>"))
    if kind == "none" or thought is None:
        return PROMPT
    return PROMPT + thought[0] + "\n" + (f"\n{thought[1]}\n\n" if kind == "closed" else "")


class Written:
    """An answer's tokens before they are split: added tokens (int) and bytes."""

    def __init__(self, tokenizer: Any, some: list[Part], cut: int | None) -> None:
        self.tokenizer = tokenizer
        units: list[int | bytes] = []
        for text, as_tokens in some:
            while text:
                found = [name for name in tokenizer.ids if as_tokens and text.startswith(name)]
                if found:
                    name = max(found, key=len)
                    units.append(tokenizer.ids[name])
                else:
                    name = text[0]
                    units += [bytes([byte]) for byte in name.encode()]
                text = text[len(name) :]
        self.units = units if cut is None else units[: cut % (len(units) + 1)]

    def tokens(self, random: Random | None) -> list[int]:
        """Return the tokens: bytes alone, or in random groups."""
        tokens, run = [], b""
        for unit in [*self.units, None]:
            if isinstance(unit, bytes):
                run += unit
                if random is not None and random.random() < 0.7:
                    continue
            if run:
                tokens.append(self.tokenizer.letters(run))
                run = b""
            if isinstance(unit, int):
                tokens.append(unit)
        return tokens

    def text(self, marked: dict[int, str], skips: bool) -> str:
        """Return the text with the marks of tokens."""
        shown, run = "", []
        for token in [*self.tokens(None), None]:
            if token is None or token in marked:
                shown += self.tokenizer.decode(run, skip_special_tokens=skips)
                shown += "" if token is None else marked[token]
                run = []
            else:
                run.append(token)
        return shown


def forced_answer(form: CallFormat, names: list[str], arguments: str) -> list[tuple[str, str]]:
    """Return the parts of an answer that a grammar makes calls: (name or "", text)."""
    found = [("", form.start)]
    for index, name in enumerate(names):
        head = (
            form.text.partition("{arguments}")[0]
            .replace("{name}", name)
            .replace("{index}", str(index))
        )
        found += [
            ("", form.separator if index else ""),
            ("", head),
            (name, arguments),
            ("", form.tail),
        ]
    return [*found, ("", form.end)]


@st.composite
def cases(draw: Any, family: str) -> dict[str, Any]:
    """A request and an answer to it."""
    kinds = ["free"] * 5 + ["raw", "content", "required", "named"]
    case: dict[str, Any] = {
        "family": family,
        "added": "all"
        if family == "gpt_oss"
        else draw(st.sampled_from(["all", "all", "some", "none"])),
        "kind": draw(st.sampled_from(kinds)),
        "opening": draw(st.sampled_from(["none", "none", "open", "closed"])),
        "continues": draw(st.sampled_from([False, False, False, True])),
        "cut": draw(st.none() | st.integers(0, 500)),
        "ends": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32)),
        "one_call": draw(st.sampled_from([False, False, True])),
    }
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    if draw(st.sampled_from([True, True, False])):
        fields |= {"tools": TOOLS, "tool_choice": draw(st.sampled_from([None, "auto", "none"]))}
    if case["one_call"]:
        fields["parallel_tool_calls"] = False
    if draw(st.integers(0, 3)) == 0:
        fields["stop"] = draw(
            st.lists(st.sampled_from(["STOP", "ab", "</", '"f', "\n\n"]), max_size=2)
        )
    if draw(st.integers(0, 3)) == 0:
        fields["include_stop_str_in_output"] = True
    if draw(st.integers(0, 3)) == 0:
        fields["skip_special_tokens"] = False
    own = call_format(family)
    if case["kind"] == "raw":
        fields["structured_outputs"] = {"regex": ".*"}
    elif case["kind"] == "content":
        fields["response_format"] = {"type": "json_object"}
        offered = own and fields.get("tools") and fields["tool_choice"] != "none"
        case["calls"] = bool(offered and draw(st.booleans()))
    elif case["kind"] in ("required", "named"):
        named = {"type": "function", "function": {"name": "f"}}
        choice = "required" if case["kind"] == "required" else named
        fields |= {"tools": TOOLS, "tool_choice": choice}
        case["form"] = own or (BARE if case["kind"] == "named" else JSON_LIST)
        several = case["kind"] == "required" and not case["one_call"]
        case["names"] = (
            draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)) if several else ["f"]
        )
    case["parts"] = draw(parts(family))
    return case | {"fields": fields}


def plain(family: str, text: str, tokens: bool) -> Part:
    """Return a part that a grammar of text may write: special tokens are no text."""
    special = [name for name, is_special in markup_texts(family).items() if is_special]
    return text, tokens and not any(name in text for name in [*special, "<end>", "<pad>"])


def written(case: dict[str, Any]) -> tuple[list[Part], list[Part], list[str]]:
    """Return the thought that the prompt opened, with its end; the answer; the call that each part is of."""
    family, some = case["family"], case["parts"]
    if case["kind"] in ("free", "raw"):
        return [], some, []
    thought = THOUGHTS.get(family, ("<think>", "</think>"))
    before: list[Part] = []
    if case["opening"] == "open" and thought:
        before = [("Hm. ab", True), (thought[1], True), ("\n", True)]
    if case["kind"] in ("required", "named"):
        content = json.dumps({"x": "".join(text for text, _ in some)}, ensure_ascii=False)
        answer = forced_answer(case["form"], case["names"], content)
        after = [plain(family, text, True) if name else (text, True) for name, text in answer]
        return before, after, [name for name, _ in answer]
    if case["calls"]:
        return before, [(calls_text(family, *NAMES[: 1 if case["one_call"] else 2]), True)], []
    after = [("{", True), *(plain(family, *part) for part in some)]
    if content := FAMILIES[family].get("content"):
        before = [*before, (content, True)]
    return before, after, []


def stopped(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return a text with marks up to the first stop string, and this."""
    places = [place for place, character in enumerate(text) if visible(character)]
    shown = visible(text)
    for end in range(1, len(shown) + 1):
        found = max((stop for stop in stops if shown[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[: places[end - 1] + 1 if include else places[end - len(found)]], found
    return text, None


def visible(text: str) -> str:
    return re.sub("[\ud800-\udfff]", "", text)


def forced_calls(text: str, parts: list[Part], names: list[str]) -> list[tuple[str, str]]:
    """Return the calls in an answer that a grammar made calls, perhaps cut off."""
    found, begin = [], 0
    for (part, _), name in zip(parts, names, strict=True):
        if name and len(text) > begin:
            found.append((name, text[begin : begin + len(part)]))
        begin += len(part)
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
@hypothesis.settings(max_examples=ANSWERS, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@given(data=st.data())
def test_the_text_is_that_of_the_tokens_without_markup(family: str, data: st.DataObject) -> None:
    check_answer(data.draw(cases(family)))


def check_answer(case: dict[str, Any]) -> None:
    family, random, kind = case["family"], Random(case["seed"]), case["kind"]
    tokenizer, markup_of = family_pieces(family, case["added"])
    request = parse(ChatRequest, case["fields"])
    if case["continues"]:
        request = request.model_copy(update={"continue_final_message": True})
    opening = opening_of(family, case["opening"])
    request.found["opening"] = opening.removeprefix(PROMPT) if case["continues"] else opening
    skips, includes = request.skips_special, bool(request.include_stop_str_in_output)
    options = {"skips_special": skips, "letters": kind == "raw"}
    markup = markup_of(**options)
    before, after, names = written(case)
    ends = tuple(
        tokenizer.ids[text] for text in ("<end>", "</s>", "<|call|>") if text in tokenizer.ids
    )
    answer = Written(tokenizer, [*before, *after], case["cut"])
    place = next((place for place, unit in enumerate(answer.units) if unit in ends), None)
    end = answer.units[place] if place is not None else ends[0] if case["ends"] else None
    if kind not in ("free", "raw") and case["cut"] is not None:
        end = None  # a grammar decides where the answer may end
    answer.units = answer.units[:place]
    tail = [] if end is None else [end]
    at_once, split = answer.tokens(None), answer.tokens(random)
    streams = [[[*at_once, *tail]], [[token] for token in [*split, *tail]] or [[]]]
    whole, streamed = read(tokenizer, markup_of, request, streams, ends, random)
    pieces, finish = joined(whole), whole[-1]
    assert joined(streamed) == pieces
    assert streamed[-1] == finish

    text = answer.text(markup.tokens, skips)
    if end is not None and includes and end not in markup.tokens:
        text += tokenizer.decode([end], skip_special_tokens=skips)
    text, stop = stopped(text, request.stop, includes)
    called = any(isinstance(piece, tuple) for piece in pieces)
    # The first call may end the answer before the stop string.
    ends_early = called and request.parallel_tool_calls is False
    assert finish.stop == stop or (ends_early and finish.stop is None)
    ended = "tool_calls" if called else "stop"
    reasons = {ended if end is not None or stop is not None else "length"}
    if ends_early:
        reasons.add(ended)
    assert finish.reason in reasons or kind in ("required", "named")
    last = "" if end is None or stop else markup.tokens.get(end, "")
    check_pieces(case, request, markup, before, after, names, text, last, pieces)


def check_pieces(
    case: dict[str, Any],
    request: ChatRequest,
    markup: Any,
    before: list[Part],
    after: list[Part],
    names: list[str],
    text: str,
    last: str,
    pieces: list[Any],
) -> None:
    family, kind = case["family"], case["kind"]
    skips = request.skips_special
    tokenizer, _ = family_pieces(family, case["added"])
    start = len(Written(tokenizer, before, None).text(markup.tokens, skips))
    thoughts = [Reasoning("Hm. ab")] if before and before[0][0] == "Hm. ab" else []
    includes = bool(request.include_stop_str_in_output)
    if kind in ("required", "named") and len(text) > start:
        if last:
            return
        rest = markup.whole(text[start:])
        calls = forced_calls(rest, after, names)
        if calls:
            assert pieces == [*thoughts, *calls], (text, pieces)
            return
    if kind == "content" and len(text) > start and not case["calls"]:
        assert pieces == [*thoughts, visible(text[start:] + (last if includes else ""))]
        return
    offered = (
        bool(request.offered_tools) and family != "think" and kind in ("free", "raw", "content")
    )
    if kind == "content" and not case["calls"]:
        offered = False
    complete: tuple[str, ...] = ()
    if offered and family not in OPEN_ENDED:
        call = calls_text(family, "f")
        if form := call_format(family):
            call = call.removeprefix(form.start).removesuffix(form.end)
        complete = (Written(tokenizer, [(call, True)], None).text(markup.tokens, skips),)
    has_thought = THOUGHTS.get(family, ("", "")) is not None
    begin = "content"
    if case["opening"] == "open" and has_thought:
        begin = "reasoning"
    elif (
        case["opening"] == "none"
        and has_thought
        and not case["continues"]
        and kind in ("free", "raw")
    ):
        begin = "begin"
    ways = [(text + last, pieces)]
    if not includes or not visible(last):
        ways.append((text, pieces))
    elif pieces and type(pieces[-1]) is str and pieces[-1].endswith(visible(last)):
        # The end token's text may follow the beginning of a delimiter, which is left out.
        rest = pieces[-1].removesuffix(visible(last))
        ways.append((text, [*pieces[:-1], *([rest] if rest else [])]))
    assert any(
        Alignment(markup, each, shown, begin, offered, case["one_call"], complete).holds()
        for each, shown in ways
    ), (text, pieces)


def test_a_stop_string_in_the_token_that_ends_the_only_call() -> None:
    """The call has ended the answer, however the letters are divided among tokens."""
    call = '<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>'
    fields = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "stop": ["STOP"],
        "include_stop_str_in_output": True,
    }
    case = {"family": "minimax_m2", "added": "all", "kind": "free", "opening": "none"}
    case |= {"continues": False, "cut": None, "ends": False, "one_call": True, "calls": False}
    for seed in range(10):
        parts = [(call, True), ("a", True), ("STOP", True)]
        check_answer(case | {"seed": seed, "parts": parts, "fields": fields})
