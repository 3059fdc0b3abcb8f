"""Limits of requests and bodies, and the gauge of the cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

import httpx
import pytest

from frontend.limits import ServeLimits
from http_box import Box, error_of

pytestmark = pytest.mark.integration

MOST = 12
BODY = {"prompt": "abc", "max_tokens": 24, "ignore_eos": True}


def test_requests_beyond_the_limit_are_refused() -> None:
    """Even if they all arrive before the first one reaches the engine."""

    async def ask(box: Box, count: int) -> list[httpx.Response]:
        connections = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(base_url=box.url, timeout=60, limits=connections) as http:
            posts = [http.post("/v1/completions", json=BODY) for _ in range(count)]
            return list(await asyncio.gather(*posts))

    with Box(limits=ServeLimits(max_requests=MOST)) as box:
        box.slow_s = 0.05
        responses = asyncio.run(ask(box, 4 * MOST))
        box.slow_s = 0.0
        statuses = Counter(response.status_code for response in responses)
        assert statuses.keys() == {200, 429}
        # Some requests may arrive after the first answers.
        assert MOST <= statuses[200] < 2 * MOST
        refused = next(response for response in responses if response.status_code == 429)
        assert error_of(refused)["type"] == "overloaded_error"
        assert error_of(refused)["message"].startswith(f"{MOST} requests are already running")
        assert refused.headers["retry-after"] == "1"
        box.wait_idle()
        assert {r.status_code for r in asyncio.run(ask(box, MOST))} == {200}


def test_bodies_that_need_too_much_memory_are_refused_and_small_ones_served() -> None:
    body = BODY | {"stream": True, "max_tokens": 100, "metadata": "m" * 400_000}
    with Box(limits=ServeLimits(max_bodies_bytes=1_000_000)) as box:
        with ExitStack() as running:
            box.slow_s = 0.5  # so that all run at the same time
            statuses, refused = [], None
            for _ in range(4):
                post = box.http.stream("POST", "/v1/completions", json=body)
                response = running.enter_context(post)
                statuses.append(response.status_code)
                if response.status_code == 429:
                    response.read()
                    refused = response
            assert statuses == [200, 200, 429, 429]
            assert refused is not None
            assert "Too many large requests" in error_of(refused)["message"]
            box.slow_s = 0.0
            box.complete()
        box.wait_idle()
        with box.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200


def test_an_idle_cache_is_not_in_use(box: Box) -> None:
    box.slow_s = 0.3  # so that the request still runs at the scrape
    body = BODY | {"stream": True, "max_tokens": 100}
    with box.http.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_text()  # kept: an iterator that is collected closes the connection
        next(pieces)
        assert 0 < box.metric("eaas_kv_cache_usage_perc") <= 1
    box.slow_s = 0.0
    for prompt in box.expected:  # their blocks stay for prefix sharing
        box.complete(prompt)
    box.wait_idle()
    assert box.metric("eaas_kv_cache_usage_perc") == 0
    assert box.metric("vllm:kv_cache_usage_perc") == 0


def test_quotes_in_errors_are_shortened(box: Box) -> None:
    for body in (BODY | {"model": "m" * 90_000}, BODY | {"structured_outputs": {"x" * 90_000: 1}}):
        response = box.http.post("/v1/completions", json=body)
        assert response.status_code in (400, 404)
        error_of(response)
        assert len(response.content) < 10_000
