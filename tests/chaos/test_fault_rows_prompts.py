"""Row 42 of the fault contract: prompts of megabytes, all refused, during the stream of another request."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from helper_process import running

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(240)]

# Those of a group come at the same time.
GROUPS = (("text", "chat", "messages"), ("ids", "logit_bias", "nesting"))
WINDOW_S = 1.0
# Generous for other load on the machine: if the endpoint parsed prompts itself, each gap would be 2 to 40 s.
MOST_TIMES_USUAL = 8
LEAST_BOUND_S = 0.75
MOST_GROWTH_BYTES = 96 << 20
MEMORY_BACK_S = 60.0


class Stream:
    """A client that streams one answer after another and records when tokens arrive."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._over = threading.Event()
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "the", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection(self._address, timeout=60)
        while not self._over.is_set():
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            while not self._over.is_set() and (event := answer.readline()):
                if event.startswith(b"data: {"):
                    assert b'"error"' not in event
                    self._times.append(time.monotonic())
            connection.close()

    def longest_gap_s(self, begin: float, end: float) -> float:
        """The longest time between two tokens in an interval; its ends count as tokens."""
        times = [begin, *(t for t in list(self._times) if begin < t < end), end]
        return max(after - before for before, after in itertools.pairwise(times))

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize(
    "body_bytes", [2_000_000, pytest.param(4_000_000, marks=pytest.mark.nightly)]
)
def test_row_42_streams_go_on_beside_prompts_of_megabytes(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., Any], body_bytes: int
) -> None:
    """Row 42: 4 MB of text, chat, messages, token ids and other fields, all refused: another stream goes on,
    memory comes back. (2 MB in `make test`.)
    """
    cluster = start_cluster(checkpoint(), servers=1, redundancy=1)
    address = cluster.endpoint.removeprefix("http://")
    client = psutil.Process(cluster.children["frontend"].pid)
    stream = Stream(address)
    try:
        time.sleep(WINDOW_S)
        memory = peak = client.memory_info().rss
        for kinds in GROUPS:
            begun = time.monotonic()
            time.sleep(WINDOW_S)
            usual = stream.longest_gap_s(begun, time.monotonic())
            begun = time.monotonic()
            words = (address, str(body_bytes), *kinds)
            with running("prompt_attacker", *words, ready="attacking") as attacker:
                for _ in range(20):
                    time.sleep(WINDOW_S / 20)
                    peak = max(peak, client.memory_info().rss)
                answers = json.loads(attacker.communicate(timeout=60)[0])
            beside = stream.longest_gap_s(begun, time.monotonic())
            print(
                f"{kinds}: longest gap {usual * 1e3:.0f} ms, attacked {beside * 1e3:.0f} ms; {answers}"
            )
            assert answers.keys() == {"400"}
            assert beside <= max(MOST_TIMES_USUAL * usual, LEAST_BOUND_S), kinds
    finally:
        stream.close()
    print(f"memory: {memory >> 20} MiB before, {peak >> 20} at most", end="")
    deadline = time.monotonic() + MEMORY_BACK_S
    while client.children() or client.memory_info().rss > memory + MOST_GROWTH_BYTES:
        assert time.monotonic() < deadline, (
            f"{client.memory_info().rss >> 20} MiB, {client.children()}"
        )
        time.sleep(0.2)
    print(f", {client.memory_info().rss >> 20} afterwards")
