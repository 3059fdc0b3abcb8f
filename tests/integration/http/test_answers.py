"""Answers: OpenAI's client, sampling, the end of an answer, other attentions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai
import pytest
import torch

from eaas.errors import ExpertsUnavailableError
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


def test_openai_models_and_errors(box: Box) -> None:
    assert [model.id for model in box.openai.models.list()] == ["tiny", "/models/tiny"]
    assert box.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="nope"):
        box.openai.chat.completions.create(**CHAT | {"model": "nope"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        box.openai.chat.completions.create(**CHAT | {"temperature": 3})
    alias = CHAT | {"model": "/models/tiny", "max_tokens": 1}
    assert box.openai.chat.completions.create(**alias).model == "tiny"


@pytest.mark.parametrize("greedy_first", [True, False])
def test_greedy_is_exact_beside_sampled_requests(box: Box, greedy_first: bool) -> None:
    def ask(index: int) -> tuple[str, str]:
        prompt = ("Hello", "abc", "zz top")[index % 3]
        greedy = (index % 2 == 0) == greedy_first
        fields = {"temperature": 0} if greedy else {"temperature": 1.5, "top_p": 0.95}
        text = box.complete(prompt, **fields)["choices"][0]["text"]
        return prompt if greedy else "", text

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(12)))
    greedy = [(prompt, text) for prompt, text in answers if prompt]
    assert len(greedy) == 6
    assert all(text == box.text(prompt) for prompt, text in greedy)
    sampled = [text for prompt, text in answers if not prompt]
    assert len(set(sampled)) == len(sampled)


def test_a_seed_repeats_its_answer_whatever_runs_beside_it(box: Box) -> None:
    def ask(seed: int | None) -> str:
        return str(box.complete(temperature=1.0, seed=seed)["choices"][0]["text"])

    first = ask(5)
    with ThreadPoolExecutor(6) as pool:
        same, other, *_rest = pool.map(ask, [5, 6, None, None, 5, 8])
    assert same == first
    assert other != first


def test_min_tokens_delays_the_end(box: Box) -> None:
    # All tokens, including the end token, become about equally likely.
    box.model.lm_head.weight.data.mul_(1e-3)
    try:
        options = {"temperature": 2.0, "ignore_eos": False, "min_tokens": 20}
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda seed: box.complete(seed=seed, **options), range(12)))
    finally:
        box.model.lm_head.weight.data.mul_(1e3)
    assert all(answer["usage"]["completion_tokens"] >= 20 for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(box: Box, stream: bool) -> None:
    text = box.text("Hello")
    stop = text[8:11]
    expected = text[: text.index(stop)]
    body = {"prompt": "Hello", "max_tokens": 24, "ignore_eos": True, "stop": ["never?", stop]}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = box.http.post("/v1/completions", json=body)
    if stream:
        chunks = events(response.text)
        got = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        choice, usage = chunks[-2]["choices"][0], chunks[-1]["usage"]
    else:
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        got = choice["text"]
    assert (got, choice["finish_reason"]) == (expected, "stop")
    assert usage["completion_tokens"] < 24


def test_an_end_token_at_the_last_position_is_a_stop(shared_box: Box) -> None:
    tokens = shared_box.expected["Hello"]
    first = tokens.index(tokens[5])
    box = Box(generation={"eos_token_id": [tokens[5]]})
    try:
        for allowed, reason in ((first + 1, "stop"), (first + 9, "stop"), (first, "length")):
            answer = box.complete(max_tokens=allowed, ignore_eos=False)
            assert answer["choices"][0]["finish_reason"] == reason
            assert answer["usage"]["completion_tokens"] == min(allowed, first + 1)
            assert answer["choices"][0]["text"] == shared_box.text("Hello", first)
    finally:
        box.close()


def test_default_budgets(box: Box) -> None:
    answer = box.http.post("/v1/completions", json={"prompt": "a", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
    answer = box.http.post("/v1/chat/completions", json=CHAT | {"ignore_eos": True}).json()
    usage, room = answer["usage"], box.http.get("/v1/models/tiny").json()["max_model_len"]
    assert usage["total_tokens"] == room == 24 * 8  # less than 1024 fits


def test_the_context_is_the_extended_one() -> None:
    with closing(Box("yarn")) as box:
        prompt = list(range(40))  # more than max_position_embeddings
        prompt_1T = torch.tensor([prompt])
        expected = tiny_model("yarn").generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            max_new_tokens=88,
            do_sample=False,
            eos_token_id=-1,
        )[0, 40:]
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
def test_other_attentions(kind: str, batched: bool) -> None:
    box = Box(kind)
    try:
        before = box.forwards
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(box.complete, box.expected))
        assert [a["choices"][0]["text"] for a in answers] == [box.text(p) for p in box.expected]
        assert (box.forwards - before < 3 * 24) == batched
        assert box.model.config._attn_implementation == ("eaas_flash" if batched else "sdpa")
        seeded = [box.complete(temperature=1.0, seed=3)["choices"][0]["text"] for _ in range(2)]
        assert seeded[0] == seeded[1] != box.text("Hello")
        assert box.complete(stop=box.text("Hello")[4])["choices"][0]["finish_reason"] == "stop"
        box.error = ExpertsUnavailableError(1, [3], "gone")
        response = box.http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert error_of(response)["type"] == "experts_unavailable"
        body = {"prompt": "a", "stream": True}
        assert list(events(box.http.post("/v1/completions", json=body).text)[-1]) == ["error"]
        box.error = None
        assert box.complete()["choices"][0]["text"] == box.text("Hello")
    finally:
        box.close()
