"""Many concurrent requests, and failures during them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pytest

from eaas.errors import ExpertsUnavailableError
from http_box import CHAT, SIZES, Box, error_of, events
from waiting import eventually

pytestmark = pytest.mark.integration


def test_more_requests_than_the_cache_holds_wait(box: Box) -> None:
    with ThreadPoolExecutor(32) as pool:
        prompts = ["Hello", "abc", "zz top", "Hello"] * 8
        answers = list(pool.map(box.complete, prompts))
    assert [a["choices"][0]["text"] for a in answers] == [box.text(prompt) for prompt in prompts]
    assert len({a["id"] for a in answers}) == 32


def test_equal_request_ids_do_not_collide(box: Box) -> None:
    box.slow_s = 0.005

    def ask(prompt: str) -> httpx.Response:
        return box.http.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 24, "ignore_eos": True},
            headers={"X-Request-Id": "mine"},
        )

    with ThreadPoolExecutor(3) as pool:
        responses = list(pool.map(ask, box.expected))
    assert [r.json()["choices"][0]["text"] for r in responses] == [
        box.text(p) for p in box.expected
    ]
    assert {r.headers["x-request-id"] for r in responses} == {"mine"}
    assert len({r.json()["id"] for r in responses}) == 3


def test_unavailable_experts_fail_only_their_batch(box: Box) -> None:
    box.error = ExpertsUnavailableError(1, [3, 5], 'nobody "answers"')
    body = {"prompt": "Hello", "max_tokens": 8}
    response = box.http.post("/v1/completions", json=body)
    assert response.status_code == 503
    error = error_of(response)
    assert error["type"] == "experts_unavailable"
    assert 'layer 1: no live replica of expert(s) 3, 5: nobody "answers"' in error["message"]
    chunks = events(box.http.post("/v1/completions", json=body | {"stream": True}).text)
    assert chunks == [{"error": error}]
    with pytest.raises(openai.APIError, match="no live replica"):
        list(box.openai.chat.completions.create(**CHAT, stream=True))
    box.wait_idle()
    assert box.http.get("/health").status_code == 200
    box.error = None
    with ThreadPoolExecutor(8) as pool:  # the whole cache is usable
        answers = list(pool.map(box.complete, ["Hello"] * 24))
    assert {answer["choices"][0]["text"] for answer in answers} == {box.text("Hello")}


def test_failure_in_the_middle_of_a_stream(box: Box) -> None:
    box.slow_s = 0.01
    body = {"prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "stream": True}
    text = ""
    with box.http.stream("POST", "/v1/completions", json=body) as response:
        for piece in response.iter_text():
            text += piece
            if text.count("data:") >= 3:
                box.error = ExpertsUnavailableError(0, [1], "gone")
    chunks = events(text)
    assert "error" in chunks[-1]
    assert all("choices" in chunk for chunk in chunks[:-1])


def test_a_bug_in_the_model_fails_all_requests(own_box: Box) -> None:
    own_box.error = RuntimeError("a bug")
    body = {"prompt": "Hello", "max_tokens": 4}
    with ThreadPoolExecutor(4) as pool:
        responses = list(
            pool.map(lambda _: own_box.http.post("/v1/completions", json=body), range(4))
        )
    for response in [
        *responses,
        own_box.http.post("/v1/completions", json=body | {"stream": True}),
    ]:
        assert response.status_code == 503
        assert "a bug" in error_of(response)["message"]
    assert own_box.http.get("/live").status_code == 503
    health = own_box.http.get("/health")
    assert health.status_code == 503
    assert "a bug" in health.json()["reason"]


def test_a_full_cache_admits_requests_after_the_running_ones_left() -> None:
    with Box(sizes=replace(SIZES, num_blocks=16)) as box:
        box.slow_s = 0.01
        body = {"max_tokens": 90, "ignore_eos": True, "stream": True}
        # The prompts differ from the first token on and share no blocks.
        streams = [
            box.http.stream("POST", "/v1/completions", json=body | {"prompt": f"{i}" * 20})
            for i in range(3)
        ]
        answers = [stream.__enter__() for stream in streams]
        eventually(lambda: box.metric("vllm:num_requests_waiting") > 0)
        for answer in answers:
            answer.close()
        for stream in streams:
            stream.__exit__(None, None, None)
        box.slow_s = 0.0
        assert box.complete()["choices"][0]["text"] == box.text("Hello")
