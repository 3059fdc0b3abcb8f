"""The server: start, other routes, stop."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from eaas.errors import ConfigError
from eaas.net.listen import bind
from http_box import SIZES, Box, events

pytestmark = pytest.mark.integration


def test_health_status_and_metrics(box: Box) -> None:
    assert box.http.get("/health").json() == {"status": "ok"}
    box.good = (False, "no expert server")
    response = box.http.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == "no expert server"
    # A restart would not bring the server back.
    assert box.http.get("/live").json() == {"status": "ok"}
    assert box.http.get("/eaas/v1/status").json() == {"epoch": 3, "members": []}
    names = ("eaas_prompt_tokens_total", "eaas_generation_tokens_total")
    before = [box.metric(name) for name in names]
    box.complete()
    assert [box.metric(name) - b for name, b in zip(names, before, strict=True)] == [5, 24]
    text = box.http.get("/metrics").text
    assert 'eaas_http_requests_total{code="200",endpoint="/v1/completions"}' in text
    for name in (
        "eaas_time_to_first_token_seconds",
        "eaas_inter_token_latency_seconds",
        "eaas_request_queue_time_seconds",
        "eaas_e2e_request_latency_seconds",
        "eaas_request_prefill_time_seconds",
        "eaas_request_decode_time_seconds",
        "eaas_request_generation_tokens",
    ):
        assert box.metric(f"{name}_count") > 0
        theirs = name.replace("eaas_", "vllm:")
        assert box.metric(f"{theirs}_sum") == box.metric(f"{name}_sum")
    box.http.get("/some/scanner/path")
    assert "scanner" not in box.http.get("/metrics").text


def test_a_cache_larger_than_memory_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="1000000000 blocks of 8 tokens does not fit"):
        Box(sizes=replace(SIZES, num_blocks=10**9))


def test_no_part_of_an_answer_waits_for_an_acknowledgement() -> None:
    with (
        bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname(), timeout=5),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_open_streams_do_not_hold_the_process(kind: str) -> None:
    others = set(threading.enumerate())
    box = Box(kind)
    box.slow_s = 0.05
    body = {"prompt": "Hello", "max_tokens": 180, "ignore_eos": True, "stream": True}
    with box.http.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_text()
        text = next(pieces)
        begun = time.monotonic()
        box.server.stop(0.3)
        assert time.monotonic() - begun < 8  # the stream alone would take 9 s more
        text += "".join(pieces)
    assert "stopping" in events(text)[-1]["error"]["message"]
    box.http.close()
    box.openai.close()
    left = {thread.name for thread in set(threading.enumerate()) - others}
    assert not left & {"generation", "http"}
    host, port = box.server.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


async def _broken() -> None:
    raise RuntimeError("it does not close")


@pytest.mark.parametrize("close_pages", [None, _broken], ids=["no dashboard", "a broken one"])
def test_running_requests_end_within_the_grace(own_box: Box, close_pages: Any) -> None:
    own_box.app.state.close_pages = close_pages
    own_box.slow_s = 0.01
    with ThreadPoolExecutor(1) as pool:
        before = own_box.forwards
        answer = pool.submit(own_box.complete)
        while own_box.forwards < before + 2:
            time.sleep(0.005)
        own_box.server.stop(20.0)
        assert answer.result()["choices"][0]["text"] == own_box.text("Hello")


def test_a_kept_connection_gets_a_last_answer(own_box: Box) -> None:
    """A client that sends its next request as soon as it has an answer must not meet a closed connection."""
    own_box.slow_s = 0.01
    body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        with own_box.http.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_text()
            next(pieces)
            stopped = pool.submit(own_box.server.stop, 20.0)
            text = "".join(pieces)
        last = own_box.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
        assert "[DONE]" in text
        assert "connection" not in response.headers
        assert last.status_code == 200
        assert last.headers["connection"] == "close"
        with pytest.raises(httpx.ConnectError):
            own_box.http.get("/health")
        stopped.result()
