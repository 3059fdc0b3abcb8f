"""The load of `eaas bench serve`: closed-loop, with the latencies that users would see."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import numpy as np

from eaas.errors import ClusterError
from eaas_cli.bench.stream import ask, load_client

__all__ = ["LoadResult", "Workload", "run_load"]

_READ_S = 120.0


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


@dataclass
class LoadResult:
    """Measured latencies and throughput of a load.

    Attributes:
        seconds: Time from the first request to the last answer.
        tokens: Number of tokens in all answers.
        ttft_s: Time to first token of each request.
        itl_s: Times between two tokens of the same answer.
    """

    seconds: float = 0.0
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def document(self) -> dict[str, object]:
        """Compute throughput and percentiles of the latencies, for a benchmark's document."""
        return {
            "decode_tokens_per_s": round(self.tokens / self.seconds, 2),
            "ttft_ms": _percentiles_ms(self.ttft_s),
            "itl_ms": _percentiles_ms(self.itl_s),
        }


def _percentiles_ms(values_s: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(values_s) * 1e3, (50, 99))
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def run_load(base_url: str, workload: Workload) -> LoadResult:
    """Send a workload to an endpoint (URL without "/v1"), `concurrency` requests at a time; measure it.

    Raises ClusterError: a request failed.
    """
    return asyncio.run(_run(base_url, workload))


async def _run(base_url: str, workload: Workload) -> LoadResult:
    result = LoadResult()
    turns = asyncio.Semaphore(workload.concurrency)
    async with load_client(base_url, _READ_S, workload.concurrency) as client:

        async def one(index: int) -> None:
            prompt = workload.prompt(workload.first + index)
            async with turns:
                answer = await ask(client, base_url, prompt, workload.output_tokens)
            if answer.error:
                raise ClusterError(f"{base_url}: {answer.error}")
            stamps = answer.stamps_s
            result.ttft_s += [stamp - answer.sent_s for stamp in stamps[:1]]
            result.itl_s += [later - stamp for stamp, later in itertools.pairwise(stamps)]
            result.tokens += answer.tokens

        started = time.monotonic()
        await asyncio.gather(*map(one, range(workload.requests)))
        result.seconds = time.monotonic() - started
    return result
