"""A closed-loop load on an OpenAI-compatible endpoint, and what its users would have seen."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import httpx
import numpy as np

from eaas.errors import ClusterError

__all__ = ["LoadResult", "Workload", "run_load"]

_READ_S = 120.0


@dataclass(frozen=True)
class Workload:
    """What is asked for: greedy completions of prompts of equal length.

    Attributes:
        requests: Requests in all.
        concurrency: Requests at a time.
        prompt_tokens: Tokens of each prompt.
        output_tokens: Tokens of each answer.
    """

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int

    def prompt(self, index: int) -> list[int]:
        """Token ids of the prompt of a request; different ones, so that no prefix is shared."""
        rng = np.random.default_rng(index)
        return [int(token) for token in rng.integers(16, 250, self.prompt_tokens)]


@dataclass
class LoadResult:
    """Measured over a load.

    Attributes:
        seconds: From the first request to the last answer.
        tokens: Tokens of all answers.
        ttft_s: Time to first token of each request.
        itl_s: Times between two tokens of the same answer.
    """

    seconds: float = 0.0
    tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def document(self) -> dict[str, object]:
        """The result in units for people."""
        return {
            "decode_tokens_per_s": round(self.tokens / self.seconds, 2),
            "ttft_ms": _percentiles_ms(self.ttft_s),
            "itl_ms": _percentiles_ms(self.itl_s),
        }


def _percentiles_ms(values_s: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.asarray(values_s) * 1e3, (50, 99))
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def run_load(base_url: str, workload: Workload) -> LoadResult:
    """Put a load on an endpoint.

    Args:
        base_url: Without "/v1".
        workload: What to ask for.

    Raises:
        ClusterError: A request failed; a benchmark counts whole runs only.
    """
    return asyncio.run(_run(base_url, workload))


async def _run(base_url: str, workload: Workload) -> LoadResult:
    result = LoadResult()
    turns = asyncio.Semaphore(workload.concurrency)
    limits = httpx.Limits(max_connections=workload.concurrency)
    async with httpx.AsyncClient(
        timeout=httpx.Timeout(10.0, read=_READ_S), limits=limits
    ) as client:
        started = time.perf_counter()
        await asyncio.gather(
            *(_one(client, base_url, workload, i, turns, result) for i in range(workload.requests))
        )
        result.seconds = time.perf_counter() - started
    return result


async def _one(
    client: httpx.AsyncClient,
    base_url: str,
    workload: Workload,
    index: int,
    turns: asyncio.Semaphore,
    result: LoadResult,
) -> None:
    body = {
        "prompt": workload.prompt(index),
        "max_tokens": workload.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with turns:
        sent = time.perf_counter()
        last: float | None = None
        usage = 0
        try:
            async with client.stream("POST", f"{base_url}/v1/completions", json=body) as response:
                if response.is_error:
                    raise ClusterError(f"{base_url}: {(await response.aread()).decode()[:200]}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    now = time.perf_counter()
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise ClusterError(f"{base_url}: {chunk['error']}")
                    usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
                    if not any(choice.get("text") for choice in chunk["choices"]):
                        continue
                    if last is None:
                        result.ttft_s.append(now - sent)
                    else:
                        result.itl_s.append(now - last)
                    last = now
        except httpx.HTTPError as error:
            raise ClusterError(f"{base_url}: {error!r}") from error
        result.tokens += usage
