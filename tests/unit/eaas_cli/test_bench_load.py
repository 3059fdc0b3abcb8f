"""Loads: closed, open, stopped, and repeated until they succeed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaas.errors import ClusterError
from eaas_cli.bench import load as module
from eaas_cli.bench.load import Load, Workload, compare, latencies, poisson, run_load
from eaas_cli.bench.stream import Answer

URL = "http://127.0.0.1:1"
PROMPTS = [[number] for number in range(6)]


class Endpoint:
    """Answers with the prompt, after a while; counts the requests that run at the same time."""

    def __init__(self, patch: pytest.MonkeyPatch, after_s: float = 0.0, errors: int = 0) -> None:
        self.after_s, self.errors = after_s, errors
        self.running = self.most = self.slow = 0
        patch.setattr(module, "ask", self.ask)

    async def ask(
        self, _client: object, _url: str, prompt: Sequence[int], max_tokens: int
    ) -> Answer:
        began = time.monotonic()
        self.running += 1
        self.slow += self.after_s > 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.after_s)
        finally:
            self.running -= 1
        self.errors -= 1
        error = "refused" if self.errors >= 0 else ""
        ended = time.monotonic()
        return Answer(began, ended, str(prompt[0]), max_tokens, (began, ended), error)


@settings(max_examples=20)
@given(st.integers(1, 9))
def test_a_closed_load_keeps_its_limit_and_the_order(at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        endpoint = Endpoint(patch, after_s=0.001)
        result = Load(URL, PROMPTS, 3, most_at_once=at_once).result()
    assert endpoint.most == min(at_once, len(PROMPTS))
    assert [answer.text for answer in result.answers] == [str(*prompt) for prompt in PROMPTS]
    assert (result.tokens, result.failed) == (3 * len(PROMPTS), ())


def test_an_open_load_is_drawn_from_its_seed() -> None:
    first, again, other = (list(itertools.islice(poisson(4.0, 6, n), 500)) for n in (1, 1, 2))
    assert first == again != other
    assert {prompt for _, prompt in first} == set(range(6))
    assert sum(pause for pause, _ in first) == pytest.approx(500 / 4, rel=0.2)


def test_a_stopped_load_has_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(monkeypatch)
    load = Load(URL, PROMPTS, 3, ((0.0, n % 6) for n in itertools.count()), most_at_once=2)
    while load.sent < 20:
        time.sleep(0.001)
    endpoint.after_s = 60.0
    while endpoint.slow < 2:
        time.sleep(0.001)
    asked = load.stop().asked
    assert not load.running
    assert len(asked) == load.sent
    assert sum(one.answer is None for one in asked) == 2
    assert all(one.answer is None or one.answer.text == str(one.prompt) for one in asked)


def test_failed_requests_are_repeated_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Endpoint(monkeypatch, errors=3)
    result = Load(lambda: URL, PROMPTS[:1], 3, again=True).result()
    assert ([a.error for a in result.answers], len(result.failed)) == ([""], 1)


def test_a_workload_fails_with_its_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Endpoint(monkeypatch, after_s=0.001, errors=1)
    with pytest.raises(ClusterError, match=f"{URL}: refused"):
        run_load(URL, Workload(4, 2, 8, 3))
    result = run_load(URL, Workload(4, 2, 8, 3))
    assert result.tokens_per_s == result.tokens / result.seconds > 0
    assert latencies([result])["ttft_ms"] == {"p50": 0.0, "p99": 0.0}
    assert latencies([result])["itl_ms"]["p50"] >= 1.0


def test_endpoints_take_turns_with_the_same_new_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    async def ask(_client: object, url: str, prompt: Sequence[int], max_tokens: int) -> Answer:
        asked.append((url, tuple(prompt)))
        began = time.monotonic()
        await asyncio.sleep(0.002 if url == "slow" else 0.0)
        first = time.monotonic()
        await asyncio.sleep(0.02 if url == "slow" else 0.001)
        return Answer(began, time.monotonic(), "a", max_tokens, (first, time.monotonic()))

    monkeypatch.setattr(module, "ask", ask)
    lines: list[str] = []
    urls = {"one": "fast", "other": "slow"}
    rows = compare(urls, Workload(2, 1, 8, 3), 3, "other", lines.append)
    assert [row["entrant"] for row in rows] == ["one", "other"]
    assert rows[0]["ratio"] > 1 == rows[1]["ratio"] == rows[1]["ttft_ratio"]
    # A warm-up and three rounds of two requests, of each endpoint in turn.
    assert [url for url, _ in asked] == ["fast", "fast", "slow", "slow"] * 4
    assert [prompt for url, prompt in asked if url == "fast"] == [
        prompt for url, prompt in asked if url == "slow"
    ]
    assert len({prompt for _, prompt in asked}) == 8
    assert len(lines) == 4
