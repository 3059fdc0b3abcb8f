"""The sequences of one request run and end together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from byte_tokenizer import byte_tokenizer
from eaas.errors import ExpertsUnavailableError
from eaas.generation.errors import ApiError
from eaas.generation.sampling import Sampling
from eaas.generation.scores import Scores
from eaas.generation.work import Delivery, Work
from frontend.families.family import Family
from frontend.families.markup import Markup
from frontend.families.reader import Call, Calls, Reasoning
from frontend.metrics import ServeMetrics
from frontend.prompts.bodies import CompletionRequest
from frontend.requests.form import Form
from frontend.requests.generation import Answer, Finish, Generation

TOKENIZER = byte_tokenizer("<|im_end|>", eos_token="<|im_end|>")
MARKUP = Markup(Family.of(TOKENIZER, "hermes"), TOKENIZER)
END = 256
PROMPT = list(TOKENIZER("Hi")["input_ids"])


class Engine:
    """Delivers what the test says, and counts what is left."""

    capacity = None

    def __init__(self) -> None:
        self.running: dict[str, Callable[[Delivery], None]] = {}
        self.refuses = ""

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        if work.id == self.refuses:
            raise ExpertsUnavailableError(1, [2], "gone")
        self.running[work.id] = deliver

    def cancel(self, request_id: str) -> None:
        self.running.pop(request_id, None)


class Rig:
    """An answer of several sequences, named by their indices."""

    def __init__(
        self,
        count: int,
        sampling: Sampling | None = None,
        echo: str | None = None,
        form: Form | None = None,
        tokenizer: Any = TOKENIZER,
        **fields: Any,
    ) -> None:
        self.engine, self.registry = Engine(), CollectorRegistry()
        service: Any = SimpleNamespace(
            engine=self.engine, tokenizer=tokenizer, metrics=ServeMetrics(self.registry)
        )
        request, ends = CompletionRequest(prompt="x", **fields), (tokenizer.eos_token_id,)
        works = [
            Work(str(index), PROMPT, len(PROMPT), 9, ends, sampling or Sampling())
            for index in range(count)
        ]
        self.answer = Answer(
            "x",
            [Generation(service, request, form or Form(), work, echo) for work in works],
            len(PROMPT),
        )

    def count(self, name: str) -> float:
        return self.registry.get_sample_value(f"eaas_{name}") or 0.0

    def ended(self, reason: str) -> float:
        labels = {"finished_reason": reason}
        return self.registry.get_sample_value("eaas_request_success_total", labels) or 0.0


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


async def take(pieces: Any, count: int) -> list[Any]:
    return [await anext(pieces) for _ in range(count)]


def run(rig: Rig, script: Callable[[Any], Any]) -> Any:
    async def whole() -> Any:
        pieces = rig.answer.pieces()
        task = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        try:
            return await script((task, pieces))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pieces.aclose()

    return asyncio.run(whole())


def test_pieces_have_the_index_of_their_choice_and_an_early_end_leaves_the_engine() -> None:
    rig = Rig(3, stop=";")

    async def script(begun: Any) -> list[Any]:
        task, pieces = begun
        send = dict(rig.engine.running)
        send["1"](Delivery(ids("b")))
        send["0"](Delivery(ids("a;")))
        send["0"](Delivery(ids("never shown")))  # under way when the string matched
        send["2"](Delivery([*ids("c"), END], finished=True))
        found = [await task, *await take(pieces, 4)]
        assert list(rig.engine.running) == ["1"]
        send["1"](Delivery(ids("d"), finished=True))
        return found + await take(pieces, 2)

    assert run(rig, script) == [
        (1, "b"),
        (0, "a"),
        (0, Finish("stop", ";")),
        (2, "c"),
        (2, Finish("stop")),
        (1, "d"),
        (1, Finish("length")),
    ]
    assert rig.engine.running == {}
    assert rig.answer.usage() == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
    }
    assert (rig.ended("stop"), rig.ended("length")) == (2, 1)


def test_one_failure_ends_all() -> None:
    rig = Rig(3)

    async def script(begun: Any) -> None:
        task, pieces = begun
        send = dict(rig.engine.running)
        send["2"](Delivery(ids("a"), finished=True))
        assert [await task, *await take(pieces, 1)] == [(2, "a"), (2, Finish("length"))]
        send["0"](Delivery([], finished=True, error=ExpertsUnavailableError(1, [2], "gone")))
        with pytest.raises(ApiError, match="layer 1") as caught:
            await anext(pieces)
        assert (caught.value.status, caught.value.type) == (503, "experts_unavailable")

    run(rig, script)
    assert rig.engine.running == {}
    assert (rig.ended("error"), rig.ended("length")) == (2, 1)


def test_a_refused_sequence_ends_those_before_it() -> None:
    rig = Rig(3)
    rig.engine.refuses = "1"

    async def all_pieces() -> list[Any]:
        return [piece async for piece in rig.answer.pieces()]

    with pytest.raises(ApiError, match="layer 1"):
        asyncio.run(all_pieces())
    assert rig.engine.running == {}
    assert rig.ended("error") == 2, "the third one never began"


def test_a_client_that_leaves_ends_all() -> None:
    rig = Rig(4)

    async def script(begun: Any) -> None:
        task, _ = begun
        rig.engine.running["0"](Delivery(ids("a")))
        assert await task == (0, "a")
        assert len(rig.engine.running) == 4

    run(rig, script)
    assert rig.engine.running == {}
    assert rig.ended("abort") == 4


def collect(deliveries: list[Delivery], rig: Rig | None = None, **fields: Any) -> list[Any]:
    """The pieces of an answer of one sequence."""
    rig = rig or Rig(1, **fields)

    async def script(begun: Any) -> list[Any]:
        task, pieces = begun
        deliver = rig.engine.running["0"]
        for delivery in deliveries:
            deliver(delivery)
        return [piece for _, piece in [await task, *[each async for each in pieces]]]

    found = list(run(rig, script))
    assert rig.engine.running == {}
    return found


def one(delivery: Delivery, rig: Rig | None = None, **fields: Any) -> list[Any]:
    return collect([delivery], rig, **fields)


def one_by_one(tokens: list[int]) -> list[Delivery]:
    return [Delivery([t], finished=i == len(tokens) - 1) for i, t in enumerate(tokens)]


def scores(count: int) -> Scores:
    empty = np.zeros((count, 0))
    return Scores(
        np.full(count, -0.5, np.float32), empty.astype(np.int32), empty.astype(np.float32)
    )


def test_an_echo_goes_before_the_answer() -> None:
    assert one(Delivery(ids("!"), finished=True), echo="Hi") == ["Hi!", Finish("length")]
    rig = Rig(1, Sampling(logprobs=0, prompt_logprobs=True), echo="Hi")
    delivery = Delivery(ids("!"), True, scores=scores(1), prompt_scores=scores(2))
    assert one(delivery, rig) == ["Hi!", Finish("length")]
    scored = rig.answer.generations[0].take_scored()
    assert scored is not None
    assert scored.tokens == ids("Hi!")
    assert len(scored.scores.logprob_T) == 3


def test_an_empty_answer_has_no_tokens() -> None:
    delivery = Delivery(ids("!"), True, scores=scores(1), prompt_scores=scores(2))
    assert one(Delivery(ids("!"), finished=True), max_tokens=0) == [Finish("length")]
    rig = Rig(1, Sampling(logprobs=0), echo="Hi", max_tokens=0)
    assert one(delivery, rig) == ["Hi", Finish("length")]
    scored = rig.answer.generations[0].take_scored()
    assert scored is not None
    assert scored.tokens == ids("Hi")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "a"),
        ({"include_stop_str_in_output": True}, "a"),
        ({"skip_special_tokens": False}, "a"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a<|im_end|>"),
        ({"stop": "a"}, ""),
        ({"stop": "a", "include_stop_str_in_output": True}, "a"),
    ],
)
def test_the_end_of_a_text(fields: dict[str, Any], text: str) -> None:
    *pieces, finish = one(Delivery([*ids("a"), END], finished=True), **fields)
    assert "".join(pieces) == text
    assert finish == Finish("stop", "a" if "stop" in fields else None)


def test_an_end_token_ends_the_text_and_is_not_shown() -> None:
    tokens, rig = [*ids("héllo"), END], Rig(1)
    *pieces, finish = collect(one_by_one(tokens), rig)
    assert "".join(pieces) == "héllo"
    assert finish == Finish("stop")
    assert rig.ended("stop") == 1
    assert rig.count("generation_tokens_total") == len(tokens)
    for name, value in (("prompt", len(PROMPT)), ("generation", len(tokens))):
        assert rig.count(f"request_{name}_tokens_count") == 1
        assert rig.count(f"request_{name}_tokens_sum") == value


@pytest.mark.parametrize(
    ("deliveries", "text", "reason"),
    [
        # What was held back is shown at the end.
        (one_by_one([*ids("ab ST"), *ids("é")[:1]]), "ab ST\ufffd", Finish("length")),
        ([Delivery(ids("ab STOP cd"))], "ab ", Finish("stop", "STOP")),
        ([Delivery([*ids("ab STOP"), *ids("é")[:1]], True)], "ab ", Finish("stop", "STOP")),
    ],
)
def test_stop_strings(deliveries: list[Delivery], text: str, reason: Finish) -> None:
    *pieces, finish = collect(deliveries, stop="STOP")
    assert ("".join(pieces), finish) == (text, reason)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "a;;b"), (6, "a;;b;;c")])
def test_stop_strings_do_not_match_before_min_tokens(min_tokens: int, text: str) -> None:
    rig = Rig(1, Sampling(min_tokens=min_tokens), stop=";;")
    *pieces, _ = collect(one_by_one(ids("a;;b;;c")), rig)
    assert "".join(pieces) == text
    assert rig.answer.generations[0].length > min_tokens


def test_parts_of_an_answer() -> None:
    answer = (
        "<think>hm</think>Look."
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    form = Form(markup=MARKUP, reading={"calls": Calls.ANYWHERE})
    *pieces, finish = collect(one_by_one([*ids(answer), END]), form=form)
    assert "".join(p for p in pieces if isinstance(p, Reasoning)) == "hm"
    text = [p for p in pieces if not isinstance(p, (Reasoning, Call))]
    assert "".join(text) == "Look."
    calls = [p for p in pieces if isinstance(p, Call)]
    assert [(c.index, c.name, json.loads(c.arguments)) for c in calls] == [
        (0, "f", {"a": 1}),
        (1, "g", {}),
    ]
    assert finish.reason == "tool_calls"


@pytest.mark.parametrize(
    ("family", "end", "answer", "arguments"),
    [
        ("hermes", "<|im_end|>", '<tool_call>\n{"name": "f", "arguments": {}}', "{}"),
        (
            "gpt_oss",
            "<|call|>",
            '<|channel|>commentary to=functions.f <|message|>{"a": 1}',
            '{"a": 1}',
        ),
    ],
)
def test_an_end_token_closes_a_call_and_is_no_part_of_it(
    family: str, end: str, answer: str, arguments: str
) -> None:
    tokenizer = byte_tokenizer(end, eos_token=end)
    markup = Markup(Family.of(tokenizer, family), tokenizer)
    form = Form(markup=markup, reading={"calls": Calls.ANYWHERE})
    call, finish = collect(one_by_one([*ids(answer), END]), form=form, tokenizer=tokenizer)
    assert (call.name, call.arguments, finish) == ("f", arguments, Finish("tool_calls"))


def test_an_end_token_in_a_call_that_is_none_is_shown_once() -> None:
    tokenizer = byte_tokenizer("[TOOL_CALLS]", "</s>", eos_token="</s>")
    markup = Markup(Family.of(tokenizer, "mistral"), tokenizer, skips_special=False)
    *pieces, _ = collect(
        one_by_one([256, *ids("a"), 257]),
        form=Form(markup=markup, reading={"calls": Calls.ANYWHERE}),
        tokenizer=tokenizer,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    assert "".join(pieces) == "[TOOL_CALLS]a</s>"
