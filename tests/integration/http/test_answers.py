"""Answers: OpenAI's client, sampling, the end of an answer, other attentions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from decoding import greedy
from http_box import CHAT, Box, error_of, events, tiny_model

pytestmark = pytest.mark.integration


def test_openai_chat(box: Box) -> None:
    whole = box.openai.chat.completions.create(**CHAT, max_tokens=9)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = list(box.openai.chat.completions.create(**CHAT, max_tokens=9, stream=True))
    first = stream[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    assert {chunk.choices[0].delta.role for chunk in stream[1:]} == {None}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    assert stream[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.choices[0].finish_reason for chunk in stream[:-1]} == {None}
    assert {chunk.id for chunk in stream} == {stream[0].id} != {whole.id}


_BOTH = pytest.mark.parametrize(
    ("path", "prompt"),
    [("completions", {"prompt": "Hello"}), ("chat/completions", {"messages": CHAT["messages"]})],
)


@_BOTH
def test_usage_is_sent_on_request(box: Box, path: str, prompt: dict[str, Any]) -> None:
    body = prompt | {"max_tokens": 9, "ignore_eos": True, "temperature": 0}
    whole = box.http.post(f"/v1/{path}", json=body).json()

    def stream(**options: bool) -> list[Any]:
        asked = body | {"stream": True} | ({"stream_options": options} if options else {})
        return events(box.http.post(f"/v1/{path}", json=asked).text)

    # As in vLLM continuous_usage_stats needs include_usage.
    for options in ({}, {"include_usage": False}, {"continuous_usage_stats": True}):
        chunks = stream(**options)
        assert not any("usage" in chunk for chunk in chunks)
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    chunks = stream(include_usage=True, include_servers=True)
    assert all("usage" in chunk for chunk in chunks)
    assert [chunk["usage"] for chunk in chunks if chunk["usage"] is not None] == [whole["usage"]]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    chunks = stream(include_usage=True, continuous_usage_stats=True)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == (0 if path.startswith("chat") else 1)
    assert len(set(counts)) > 3
    assert counts[-1] == counts[-2] == 9
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {
        whole["usage"]["prompt_tokens"]
    }


def test_every_event_of_a_stream_has_the_same_date(box: Box) -> None:
    box.slow_s = 0.06  # the stream takes more than a second
    body = {"prompt": "Hello", "max_tokens": 24, "ignore_eos": True, "stream": True}
    chunks = events(box.http.post("/v1/completions", json=body).text)
    assert len({(chunk["created"], chunk["id"], chunk["model"]) for chunk in chunks}) == 1


def test_openai_completions(box: Box) -> None:
    body: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 24}
    extra = {"ignore_eos": True}
    whole = box.openai.completions.create(**body, extra_body=extra)
    assert whole.choices[0].text == box.text("Hello")
    assert whole.choices[0].finish_reason == "length"
    stream = list(box.openai.completions.create(**body, extra_body=extra, stream=True))
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in stream] == [None] * (len(stream) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in stream)


def test_an_end_token_at_the_last_position_is_a_stop(shared_box: Box) -> None:
    tokens = shared_box.expected["Hello"]
    first = tokens.index(tokens[5])
    with Box(generation={"eos_token_id": [tokens[5]]}) as box:
        for allowed, reason in ((first + 1, "stop"), (first + 9, "stop"), (first, "length")):
            answer = box.complete(max_tokens=allowed, ignore_eos=False)
            assert answer["choices"][0]["finish_reason"] == reason
            assert answer["usage"]["completion_tokens"] == min(allowed, first + 1)
            assert answer["choices"][0]["text"] == shared_box.text("Hello", first)


def test_default_budgets(box: Box) -> None:
    answer = box.http.post("/v1/completions", json={"prompt": "a", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
    answer = box.http.post("/v1/chat/completions", json=CHAT | {"ignore_eos": True}).json()
    usage, room = answer["usage"], box.http.get("/v1/models/tiny").json()["max_model_len"]
    assert usage["total_tokens"] == room == 24 * 8  # less than 1024 fits


def test_the_context_is_the_extended_one() -> None:
    with Box("yarn") as box:
        prompt = list(range(40))  # more than max_position_embeddings
        expected = greedy(tiny_model("yarn"), prompt, 88)
        answer = box.complete(prompt, max_tokens=88)
        assert answer["choices"][0]["text"] == box.tokenizer.decode(
            expected, skip_special_tokens=True
        )
        assert answer["usage"]["total_tokens"] == 128
        assert box.http.get("/v1/models/tiny").json()["max_model_len"] == 128
        body = {"prompt": prompt, "max_tokens": 89}
        response = box.http.post("/v1/completions", json=body)
        assert error_of(response)["code"] == "context_length_exceeded"


def test_one_token_answers_never_hang(box: Box) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: box.complete(max_tokens=1, stream=False), range(24)))
        streams = list(
            pool.map(
                lambda _: (
                    box.http.post(
                        "/v1/completions", json={"prompt": "abc", "max_tokens": 1, "stream": True}
                    ).text
                ),
                range(24),
            )
        )
    assert {answer["choices"][0]["text"] for answer in answers} == {box.text("Hello", 1)}
    assert all(events(stream)[-1]["choices"][0]["finish_reason"] for stream in streams)


@pytest.mark.parametrize(
    ("kind", "batched"), [("gpt_oss", True), ("deepseek_v3", True), ("qwen3_next", False)]
)
def test_other_attentions(boxes: Callable[[str], Box], kind: str, batched: bool) -> None:
    box = boxes(kind)
    before = box.forwards
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(box.complete, box.expected))
    assert [a["choices"][0]["text"] for a in answers] == [box.text(p) for p in box.expected]
    assert (box.forwards - before < 3 * 24) == batched
    assert box.model.config._attn_implementation == ("eaas_flash" if batched else "sdpa")
