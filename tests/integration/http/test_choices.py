"""Several choices per prompt and several prompts per request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.limits import ServeLimits
from http_box import CHAT, Box, error_of, events

pytestmark = pytest.mark.integration

PROMPTS = ["Hello", "abc", "zz top"]
DRAWN = {"temperature": 1.0, "seed": 5}
FEW = 6


@pytest.fixture(scope="module")
def limited() -> Iterator[Box]:
    limits = ServeLimits(max_requests=FEW)
    with Box(limits=limits) as box:
        yield box


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_prompts_and_choices_are_indexed(engine: Box) -> None:
    ids = [engine.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = [engine.text(prompt) for prompt in PROMPTS]
    for prompts in (PROMPTS, ids, [PROMPTS[0], *ids[1:]]):
        answer = engine.complete(prompts)
        assert texts(answer) == expected
        assert answer["usage"] == {
            "prompt_tokens": sum(map(len, ids)),
            "completion_tokens": 3 * 24,
            "total_tokens": sum(map(len, ids)) + 3 * 24,
        }
    answer = engine.complete(PROMPTS, n=2, best_of=2, max_tokens=4)
    assert texts(answer) == [engine.text(prompt, 4) for prompt in PROMPTS for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 6 * 4


def test_choices_differ_and_repeat(engine: Box) -> None:
    first = texts(engine.complete(n=4, **DRAWN))
    assert len(set(first)) == 4
    assert texts(engine.complete(n=4, **DRAWN)) == first
    assert texts(engine.complete(n=1, **DRAWN)) == first[:1]
    assert texts(engine.complete(["Hello", "abc"], n=4, **DRAWN))[:4] == first
    without_seed = texts(engine.complete(["Hello"] * 3, temperature=1.0))
    assert len(set(without_seed)) == 3


def test_a_stream_names_each_choice(engine: Box) -> None:
    fields = {"n": 2, "max_tokens": 7, **DRAWN}
    whole = engine.complete(PROMPTS, **fields)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPTS, "ignore_eos": True, "stream": True, "stream_options": options}
    *chunks, last = events(engine.http.post("/v1/completions", json=body | fields).text)
    got = [""] * 6
    reasons: list[str | None] = [None] * 6
    order = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        order.append(choice["index"])
        got[choice["index"]] += choice["text"]
        assert reasons[choice["index"]] is None, "its last event was sent"
        reasons[choice["index"]] = choice["finish_reason"]
    assert got == texts(whole)
    assert reasons == ["length"] * 6
    assert last["usage"] == whole["usage"]
    assert last["choices"] == []
    assert all(chunk["usage"]["completion_tokens"] <= 7 for chunk in chunks)
    if engine.model.config.model_type == "qwen3_moe":
        assert order != sorted(order), "choices run together"


def test_openai_chat_with_several_choices(box: Box) -> None:
    body: Any = CHAT | {"n": 3, "max_tokens": 6, "temperature": 1.0, "seed": 2}
    whole = box.openai.chat.completions.create(**body, logprobs=True)
    contents = [choice.message.content for choice in whole.choices]
    assert len(set(contents)) == 3
    assert all(choice.logprobs.content for choice in whole.choices)
    streamed = ["", "", ""]
    roles = []
    for chunk in box.openai.chat.completions.create(**body, stream=True):
        delta = chunk.choices[0].delta
        streamed[chunk.choices[0].index] += delta.content or ""
        roles += [chunk.choices[0].index] if delta.role else []
    assert streamed == contents
    assert sorted(roles) == [0, 1, 2]


def test_each_choice_stops_alone(box: Box) -> None:
    stop = box.text("Hello")[3]
    answer = box.complete(PROMPTS, stop=stop)
    for prompt, choice in zip(PROMPTS, answer["choices"], strict=True):
        before, found, _ = box.text(prompt).partition(stop)
        assert choice["text"] == before
        assert choice["finish_reason"] == ("stop" if found else "length")
    box.wait_idle()


def test_a_client_that_leaves_cancels_all_choices(engine: Box) -> None:
    engine.slow_s = 0.02
    body = {"prompt": PROMPTS, "n": 4, "max_tokens": 100, "ignore_eos": True, "stream": True}
    body |= {"logprobs": 2, "echo": True, "frequency_penalty": 1}
    with engine.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    engine.slow_s = 0.0
    engine.wait_idle()
    assert engine.metric("eaas_kv_cache_usage_perc") == 0
    assert texts(engine.complete(PROMPTS)) == [engine.text(prompt) for prompt in PROMPTS]


def test_each_sequence_counts_towards_the_limit(limited: Box) -> None:
    response = limited.http.post("/v1/completions", json={"prompt": PROMPTS, "n": 3})
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"
    response = limited.http.post("/v1/completions", json={"prompt": "a", "n": FEW + 1})
    assert (response.status_code, error_of(response)["param"]) == (400, "n")
    limited.slow_s = 0.02
    body = {"prompt": "a", "n": FEW - 1, "max_tokens": 60, "ignore_eos": True, "stream": True}
    started = threading.Event()

    def run() -> None:
        with limited.http.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                started.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    response = limited.http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert response.status_code == 429
    assert limited.complete("abc", max_tokens=1)["choices"][0]["text"] == limited.text("abc", 1)
    limited.slow_s = 0.0
    thread.join()
    limited.wait_idle()
    assert len(limited.complete(["a"] * FEW, max_tokens=1)["choices"]) == FEW


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], [260]]}, "prompt"),
        ({"prompt": "a", "logit_bias": {"260": 1}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [260]}, "stop_token_ids"),
        ({"prompt": ["a"] * 128, "n": 128}, "prompt"),
        ({"prompt": ["a" * 190] * 400, "n": 1, "max_tokens": 1, "echo": True, "logprobs": 20},
         "logprobs"),
    ],
)  # fmt: skip
def test_too_much_is_refused_by_name(box: Box, body: dict[str, Any], param: str) -> None:
    response = box.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
