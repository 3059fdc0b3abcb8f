"""The sequences of one request run and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from byte_tokenizer import byte_tokenizer
from eaas.errors import ExpertsUnavailableError
from eaas.generation.errors import ApiError
from eaas.generation.sampling import Sampling
from eaas.generation.work import Delivery, Work
from frontend.families.family import Family
from frontend.families.markup import Markup
from frontend.families.reader import Calls
from frontend.metrics import ServeMetrics
from frontend.prompts.bodies import CompletionRequest
from frontend.requests.form import Form
from frontend.requests.generation import Answer, Finish, Generation

TOKENIZER = byte_tokenizer("<|im_end|>", eos_token="<|im_end|>")
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
            [Generation(service, request, form or Form(), work) for work in works],
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


def one_by_one(tokens: list[int]) -> list[Delivery]:
    return [Delivery([t], finished=i == len(tokens) - 1) for i, t in enumerate(tokens)]


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


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "a;;b"), (6, "a;;b;;c")])
def test_stop_strings_do_not_match_before_min_tokens(min_tokens: int, text: str) -> None:
    rig = Rig(1, Sampling(min_tokens=min_tokens), stop=";;")
    *pieces, _ = collect(one_by_one(ids("a;;b;;c")), rig)
    assert "".join(pieces) == text
    assert rig.answer.generations[0].length > min_tokens


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
