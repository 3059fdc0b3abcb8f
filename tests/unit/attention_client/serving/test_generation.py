import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from attention_client.serving.families.family import Family
from attention_client.serving.families.markup import Markup
from attention_client.serving.families.reader import Call, Calls, Reasoning
from attention_client.serving.metrics import ServeMetrics
from attention_client.serving.prompts.bodies import CompletionRequest
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.generation import Answer, Finish, Generation
from byte_tokenizer import byte_tokenizer
from eaas.errors import ExpertsUnavailableError
from eaas.generation.errors import ApiError
from eaas.generation.sampling import Sampling
from eaas.generation.work import Delivery, Work

END = 256
TOKENIZER = byte_tokenizer("<|im_end|>", eos_token="<|im_end|>")
MARKUP = Markup(Family.of(TOKENIZER, "hermes"), TOKENIZER)


class ScriptedEngine:
    """Delivers a fixed list and records cancellations."""

    capacity = None

    def __init__(self, deliveries: list[Delivery]) -> None:
        self.deliveries = deliveries
        self.cancelled: list[str] = []

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        for delivery in self.deliveries:
            deliver(delivery)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def one_by_one(tokens: list[int]) -> list[Delivery]:
    return [Delivery([t], finished=i == len(tokens) - 1) for i, t in enumerate(tokens)]


def generation(
    deliveries: list[Delivery],
    form: Form | None = None,
    min_tokens: int = 0,
    tokenizer: Any = TOKENIZER,
    end: int = END,
    **fields: Any,
) -> tuple[Generation, ScriptedEngine, CollectorRegistry]:
    engine, registry = ScriptedEngine(deliveries), CollectorRegistry()
    work = Work("x-1", [1, 2, 3], 3, 1000, (end,), Sampling(min_tokens=min_tokens))
    service: Any = SimpleNamespace(
        engine=engine, tokenizer=tokenizer, metrics=ServeMetrics(registry)
    )
    request = CompletionRequest(prompt="x", **fields)
    return Generation(service, request, form or Form(), work), engine, registry


def collect(it: Generation) -> list[Any]:
    async def run() -> list[Any]:
        return [piece async for _, piece in Answer("x", [it], 3).pieces()]

    return asyncio.run(run())


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def test_an_end_token_ends_the_text_and_is_not_shown() -> None:
    tokens = [*ids("héllo"), END]
    it, engine, registry = generation(one_by_one(tokens))
    *pieces, finish = collect(it)
    assert "".join(pieces) == "héllo"
    assert finish == Finish("stop")
    assert len(it.prompt) + len(it.ids) == 3 + len(tokens)
    assert engine.cancelled == ["x-1"]  # no effect on a finished request
    stop = {"finished_reason": "stop"}
    assert registry.get_sample_value("eaas_request_success_total", stop) == 1
    assert registry.get_sample_value("eaas_generation_tokens_total") == len(tokens)
    for name, value in (("prompt", 3), ("generation", len(tokens))):
        assert registry.get_sample_value(f"eaas_request_{name}_tokens_count") == 1
        assert registry.get_sample_value(f"eaas_request_{name}_tokens_sum") == value


def test_text_held_back_is_shown_at_the_end() -> None:
    unfinished = ids("é")[:1]
    it, *_ = generation(one_by_one([*ids("ab ST"), *unfinished]), stop="STOP")
    *pieces, finish = collect(it)
    assert "".join(pieces) == "ab ST\ufffd"
    assert finish.reason == "length"


def test_a_stop_string_ends_the_answer_within_a_delivery() -> None:
    it, engine, _ = generation([Delivery(ids("ab STOP cd"))], stop="STOP")
    assert collect(it) == ["ab ", Finish("stop", "STOP")]
    assert it.ids == ids("ab STOP")
    assert engine.cancelled == ["x-1"]


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "a;;b"), (6, "a;;b;;c")])
def test_stop_strings_do_not_match_before_min_tokens(min_tokens: int, text: str) -> None:
    it, *_ = generation(one_by_one(ids("a;;b;;c")), stop=";;", min_tokens=min_tokens)
    *pieces, _ = collect(it)
    assert "".join(pieces) == text
    assert len(it.ids) > min_tokens


def test_parts_of_an_answer() -> None:
    answer = (
        "<think>hm</think>Look."
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    form = Form(markup=MARKUP, reading={"calls": Calls.ANYWHERE})
    it, *_ = generation(one_by_one([*ids(answer), END]), form=form)
    *pieces, finish = collect(it)
    assert "".join(p for p in pieces if isinstance(p, Reasoning)) == "hm"
    text = [p for p in pieces if not isinstance(p, (Reasoning, Call))]
    assert "".join(text) == "Look."
    calls = [p for p in pieces if isinstance(p, Call)]
    assert [(c.index, c.name, json.loads(c.arguments)) for c in calls] == [
        (0, "f", {"a": 1}),
        (1, "g", {}),
    ]
    assert finish.reason == "tool_calls"


def test_a_stop_string_before_half_a_character_ends_the_answer() -> None:
    (half,) = ids("é")[:1]
    it, *_ = generation([Delivery([*ids("ab STOP"), half], finished=True)], stop="STOP")
    *pieces, finish = collect(it)
    assert ("".join(pieces), finish) == ("ab ", Finish("stop", "STOP"))


def test_an_end_token_is_no_part_of_a_call_that_was_not_closed() -> None:
    form = Form(markup=MARKUP, reading={"calls": Calls.ANYWHERE})
    tokens = [*ids('<tool_call>\n{"name": "f", "arguments": {}}'), END]
    it, *_ = generation(one_by_one(tokens), form=form)
    call, finish = collect(it)
    assert (call.name, call.arguments, finish) == ("f", "{}", Finish("tool_calls"))


def test_an_end_token_closes_a_call() -> None:
    tokenizer = byte_tokenizer("<|call|>", eos_token="<|call|>")
    markup = Markup(Family.of(tokenizer, "gpt_oss"), tokenizer)
    form = Form(markup=markup, reading={"calls": Calls.ANYWHERE})
    tokens = [*ids('<|channel|>commentary to=functions.f <|message|>{"a": 1}'), END]
    it, *_ = generation(one_by_one(tokens), form=form)
    call, finish = collect(it)
    assert (call.name, call.arguments, finish) == ("f", '{"a": 1}', Finish("tool_calls"))


def test_an_end_token_in_a_call_that_is_none_is_shown_once() -> None:
    tokenizer = byte_tokenizer("[TOOL_CALLS]", "</s>", eos_token="</s>")
    markup = Markup(Family.of(tokenizer, "mistral"), tokenizer, skips_special=False)
    it, *_ = generation(
        one_by_one([256, *ids("a"), 257]),
        form=Form(markup=markup, reading={"calls": Calls.ANYWHERE}),
        tokenizer=tokenizer,
        end=257,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    *pieces, _ = collect(it)
    assert "".join(pieces) == "[TOOL_CALLS]a</s>"


def test_an_error_of_the_engine_is_raised() -> None:
    error = ExpertsUnavailableError(1, [2], "gone")
    failed = [Delivery(ids("a")), Delivery([], finished=True, error=error)]
    it, _, registry = generation(failed)
    with pytest.raises(ApiError, match="layer 1") as caught:
        collect(it)
    assert (caught.value.status, caught.value.type) == (503, "experts_unavailable")
    labels = {"finished_reason": "error"}
    assert registry.get_sample_value("eaas_request_success_total", labels) == 1


def test_closing_the_iterator_cancels() -> None:
    it, engine, registry = generation([Delivery(ids("a")), Delivery(ids("b"))])

    async def run() -> None:
        pieces = Answer("x", [it], 3).pieces()
        assert await anext(pieces) == (0, "a")
        assert engine.cancelled == []
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert engine.cancelled == ["x-1"]
    labels = {"finished_reason": "abort"}
    assert registry.get_sample_value("eaas_request_success_total", labels) == 1
