"""The load generator of benchmarks and chaos runs: streamed completions, with the times that users would see.

A load is closed (the next request waits until fewer than so many run) or open (requests come at their times).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import httpx
import numpy as np

from eaas.errors import ClusterError
from eaas.net.api_keys import authorization
from eaas.net.http_client import http_settings
from eaas_cli.bench.command import figure, ratio
from eaas_cli.bench.stream import Answer, ask

__all__ = ["Asked", "Load", "LoadResult", "Workload", "compare", "latencies", "poisson", "run_load"]

# A slow processor takes minutes to the first token of many long prompts.
_READ_S = 600.0
_AGAIN_S = 0.05
# Interval of the checks whether the load is stopped.
_CHECK_S = 0.1


@dataclass(frozen=True)
class Workload:
    """The load's requests: greedy completions of prompts of equal length.

    Attributes:
        first: Index of the first prompt, so that a further load has other prompts.
    """

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    first: int = 0

    def prompt(self, index: int) -> list[int]:
        """Make the token ids of a request's prompt: random, so that no two share a prefix worth caching."""
        rng = np.random.default_rng(index)
        return [int(token) for token in rng.integers(16, 250, self.prompt_tokens)]


@dataclass(frozen=True)
class Asked:
    """A request of a load. Times are monotonic seconds.

    Attributes:
        prompt: Number of its prompt.
        due_s: Scheduled time.
        answer: The answer; None if none came before the load was stopped.
    """

    prompt: int
    due_s: float
    answer: Answer | None


@dataclass(frozen=True)
class LoadResult:
    """What a load measured. Times are monotonic seconds.

    Attributes:
        began_s: Time of the first request.
        ended_s: Time of the last answer.
        asked: All requests, in scheduled order.
        failed: The first error of each request that was repeated.
    """

    began_s: float
    ended_s: float
    asked: tuple[Asked, ...]
    failed: tuple[Answer, ...] = ()

    @property
    def answers(self) -> list[Answer]:
        """The answers, also those with an error."""
        return [asked.answer for asked in self.asked if asked.answer is not None]

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last answer."""
        return self.ended_s - self.began_s

    @property
    def tokens(self) -> int:
        """Number of tokens in all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds

    @property
    def stall_s(self) -> float:
        """Longest pause within an answer."""
        return max((answer.stall_s for answer in self.answers), default=0.0)

    @property
    def ttft_s(self) -> list[float]:
        """Time to first token of each request."""
        return [stamp - a.sent_s for a in self.answers for stamp in a.stamps_s[:1]]


def latencies(runs: Sequence[LoadResult]) -> dict[str, dict[str, float]]:
    """Compute percentiles of the latencies over all answers of the loads, for a benchmark's document."""
    between = [
        later - stamp
        for run in runs
        for answer in run.answers
        for stamp, later in itertools.pairwise(answer.stamps_s)
    ]
    found = {"ttft_ms": [first for run in runs for first in run.ttft_s], "itl_ms": between}
    return {
        name: {
            p: round(float(np.percentile(values_s, int(p[1:])) * 1e3), 3) for p in ("p50", "p99")
        }
        for name, values_s in found.items()
    }


def run_load(endpoint: str, workload: Workload) -> LoadResult:
    """Send a workload to an endpoint (URL without "/v1"), `concurrency` requests at a time; measure it.

    Raises ClusterError: a request failed.
    """
    prompts = [workload.prompt(workload.first + index) for index in range(workload.requests)]
    load = Load(endpoint, prompts, workload.output_tokens, most_at_once=workload.concurrency)
    result = load.result()
    for answer in result.answers:
        if answer.error:
            raise ClusterError(f"{endpoint}: {answer.error}")
    return result


def compare(
    urls: Mapping[str, str],
    workload: Workload,
    rounds: int,
    reference: str,
    say: Callable[[str], None],
    *,
    pause_s: float = 0.0,
) -> list[dict[str, Any]]:
    """Send a workload to endpoints, which take turns in each round after a warm-up; return a row for each.

    Prompts are new in each round, so that no endpoint has them in a cache.

    Args:
        urls: Endpoints by name.
        reference: The endpoint that the ratios are to.
        pause_s: Pause before each turn.

    Returns:
        entrant; tokens_per_s, ratio and ttft_ratio, medians over the rounds; `latencies` over all rounds.

    Raises:
        ClusterError: A request failed.
    """
    runs: dict[str, list[LoadResult]] = {name: [] for name in urls}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up ...")
        now = replace(workload, first=workload.first + number * workload.requests)
        for name, url in urls.items():
            time.sleep(pause_s)
            result = run_load(url, now)
            if number:
                runs[name].append(result)
    rates = {name: [run.tokens_per_s for run in of] for name, of in runs.items()}
    firsts = {name: [median(run.ttft_s) for run in of] for name, of in runs.items()}
    return [
        {
            "entrant": name,
            "tokens_per_s": figure(median(rates[name])),
            "ratio": ratio(rates[name], rates[reference]),
            "ttft_ratio": ratio(firsts[name], firsts[reference]),
            **latencies(runs[name]),
        }
        for name in urls
    ]


def poisson(rate: float, prompts: int, seed: int) -> Iterator[tuple[float, int]]:
    """Draw an open load without end: pauses for a mean of `rate` requests per second, and prompts."""
    dice = random.Random(f"{seed} load")
    while True:
        yield dice.expovariate(rate), dice.randrange(prompts)


class Load:
    """Sends completion requests to an endpoint from its own thread.

    Args:
        endpoint: URL without "/v1", or what returns it: a restarted cluster has another one.
        prompts: Token ids.
        order: Pause before each request in seconds, and the number of its prompt. None: each prompt once,
            without pauses.
        most_at_once: Limit of running requests; None: no limit.
        again: Repeat a request that fails until it succeeds.
        read_s: Longest pause of an answer.
        headers: Of each request. None: the API key of the environment.
    """

    def __init__(
        self,
        endpoint: str | Callable[[], str],
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        order: Iterable[tuple[float, int]] | None = None,
        *,
        most_at_once: int | None = None,
        again: bool = False,
        read_s: float = _READ_S,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._endpoint = endpoint if callable(endpoint) else lambda: endpoint
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._order = ((0.0, number) for number in range(len(prompts))) if order is None else order
        self._most_at_once = most_at_once
        self._again = again
        self._client = httpx.AsyncClient(
            **http_settings(self._endpoint()),
            headers=authorization() if headers is None else headers,
            timeout=httpx.Timeout(10.0, read=read_s),
            limits=httpx.Limits(max_connections=None),
        )
        self._tasks: list[tuple[int, float, asyncio.Task[Answer]]] = []
        self._failed: list[Answer] = []
        self._over = threading.Event()
        self._patience_s = 0.0
        self._result: LoadResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    @property
    def sent(self) -> int:
        """Number of requests sent so far, answered or not. Thread-safe."""
        return len(self._tasks)

    @property
    def running(self) -> bool:
        """Whether requests are still sent or running."""
        return self._thread.is_alive()

    def result(self) -> LoadResult:
        """Wait for the last answer; return the result."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self, patience_s: float = 0.0) -> LoadResult:
        """Stop sending, give running requests `patience_s` to end, and cancel the rest. Idempotent."""
        self._patience_s = patience_s
        self._over.set()
        return self.result()

    def _run(self) -> None:
        try:
            self._result = asyncio.run(self._all())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error

    async def _all(self) -> LoadResult:
        async with self._client:
            began = due = time.monotonic()
            running: set[asyncio.Task[Answer]] = set()
            for pause_s, prompt in self._order:
                due += pause_s
                while (left := due - time.monotonic()) > 0 and not self._over.is_set():
                    await asyncio.sleep(min(left, _CHECK_S))
                while len(running) == self._most_at_once and not self._over.is_set():
                    await asyncio.wait(
                        running, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED
                    )
                if self._over.is_set():
                    break
                task = asyncio.create_task(self._ask(prompt))
                running.add(task)
                task.add_done_callback(running.discard)
                self._tasks.append((prompt, due, task))
            while running and not self._over.is_set():
                await asyncio.wait(running, timeout=_CHECK_S)
            if running:
                await asyncio.wait(running, timeout=self._patience_s)
            asked = tuple(
                Asked(prompt, due_s, task.result() if task.done() else None)
                for prompt, due_s, task in self._tasks
            )
            result = LoadResult(began, time.monotonic(), asked, tuple(self._failed))
            for task in tuple(running):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            return result

    async def _ask(self, prompt: int) -> Answer:
        for attempt in itertools.count():
            tokens, endpoint = self._prompts[prompt], self._endpoint()
            answer = await ask(self._client, endpoint, tokens, self._max_tokens)
            if not answer.error or not self._again:
                break
            if attempt == 0:
                self._failed.append(answer)
            await asyncio.sleep(_AGAIN_S)
        return answer
