"""The measurement: all engines run, and take turns under the same load."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.vllm.engines import cluster, own_python, plain_vllm
from eaas.errors import ConfigError

__all__ = ["bench_vllm"]

_PLAIN = "vllm, local experts"
_TOKEN_S = 300.0
_WARM_TOKENS = 16
# vLLM's processes poll for a second after their last token, and would take the next engine's cores.
_PAUSE_S = 1.5


def bench_vllm(
    model: Path,
    *,
    servers: Sequence[int],
    streams: Sequence[int],
    max_tokens: int,
    rounds: int,
    vllm_python: Path,
    embedded: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the tokens/s of short prompts and long answers, and the ratios to plain vLLM.

    The engines take turns in each round, so that a slow minute of the machine meets all of them.

    Raises:
        ConfigError: There is no Python with vLLM.
        ClusterError: An engine does not start.
    """
    if not vllm_python.is_file():
        raise ConfigError(f"--vllm-python {vllm_python}: not there; run `make setup-vllm`")
    model = model.resolve()
    with ExitStack() as stack:
        urls: dict[str, str] = {}

        def start(name: str, engine: Any) -> None:
            say(f"starting: {name}")
            urls[name] = stack.enter_context(engine)

        start(_PLAIN, plain_vllm(vllm_python, model))
        for count in servers:
            name = f"vllm, {count} expert server{'s' if count > 1 else ''}"
            start(name, cluster(vllm_python, model, count, "vllm"))
        if embedded:
            name = f"embedded, {servers[-1]} expert server{'s' if servers[-1] > 1 else ''}"
            start(name, cluster(own_python(), model, servers[-1], "transformers"))
        rows = [
            row
            for count in streams
            for row in asyncio.run(_measure(urls, model.name, count, max_tokens, rounds, say))
        ]
    return {"model": model.name, "max_tokens": max_tokens, "rounds": rounds, "rows": rows}


async def _measure(
    urls: dict[str, str],
    model: str,
    streams: int,
    max_tokens: int,
    rounds: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    rates: dict[str, list[float]] = {name: [] for name in urls}
    async with httpx.AsyncClient(timeout=_TOKEN_S, trust_env=False) as http:
        for url in urls.values():
            await _load(http, url, model, streams, _WARM_TOKENS)
        for turn in range(rounds):
            say(f"{streams} streams, round {turn + 1} of {rounds}")
            for name, url in urls.items():
                await asyncio.sleep(_PAUSE_S)
                rates[name].append(await _load(http, url, model, streams, max_tokens))
    return [
        {
            "engine": name,
            "streams": streams,
            "tokens_per_s": statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, rates[_PLAIN], strict=True)),
        }
        for name, own in rates.items()
    ]


async def _load(
    http: httpx.AsyncClient, url: str, model: str, streams: int, max_tokens: int
) -> float:
    """Decode with all streams at once; return tokens/s from the requests to the last token of any stream.

    The first token counts, because a client on busy cores may read several tokens late and at once.
    """
    started = time.monotonic()
    tokens = await asyncio.gather(
        *[_stream(http, url, model, i, max_tokens) for i in range(streams)]
    )
    return sum(tokens) / (time.monotonic() - started)


async def _stream(
    http: httpx.AsyncClient, url: str, model: str, number: int, max_tokens: int
) -> int:
    body = {
        "model": model,
        "prompt": f"The sea is number {number} and",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    tokens = 0
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            tokens += line.startswith("data: {")
    return tokens
