"""The sequences of one request run and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from attention_client.serving.metrics import ServeMetrics
from attention_client.serving.prompts.bodies import CompletionRequest
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.generation import Answer, Finish, Generation
from byte_tokenizer import byte_tokenizer
from eaas.errors import ExpertsUnavailableError
from eaas.generation.errors import ApiError
from eaas.generation.sampling import Sampling
from eaas.generation.scores import Scores
from eaas.generation.work import Delivery, Work

TOKENIZER = byte_tokenizer("<end>", eos_token="<end>")
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
        self, count: int, sampling: Sampling | None = None, echo: str | None = None, **fields: Any
    ) -> None:
        self.engine, self.registry = Engine(), CollectorRegistry()
        service: Any = SimpleNamespace(
            engine=self.engine, tokenizer=TOKENIZER, metrics=ServeMetrics(self.registry)
        )
        request = CompletionRequest(prompt="x", **fields)
        works = [
            Work(str(index), PROMPT, len(PROMPT), 9, (END,), sampling or Sampling())
            for index in range(count)
        ]
        self.answer = Answer(
            "x",
            [Generation(service, request, Form(), work, echo) for work in works],
            len(PROMPT),
        )

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
        with pytest.raises(ApiError, match="layer 1"):
            await anext(pieces)

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


def one(delivery: Delivery, rig: Rig | None = None, **fields: Any) -> list[Any]:
    rig = rig or Rig(1, **fields)

    async def script(begun: Any) -> list[Any]:
        task, pieces = begun
        rig.engine.running["0"](delivery)
        return [piece for _, piece in [await task, *[each async for each in pieces]]]

    return list(run(rig, script))


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
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a<end>"),
        ({"stop": "a"}, ""),
        ({"stop": "a", "include_stop_str_in_output": True}, "a"),
    ],
)
def test_the_end_of_a_text(fields: dict[str, Any], text: str) -> None:
    *pieces, finish = one(Delivery([*ids("a"), END], finished=True), **fields)
    assert "".join(pieces) == text
    assert finish == Finish("stop", "a" if "stop" in fields else None)
