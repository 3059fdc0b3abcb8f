"""The measurement: all engines run, and take turns under the same load."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.vllm.engines import cluster, llama_server, own_python, plain_vllm
from eaas.errors import ConfigError
from eaas.hub_cache import model_name

__all__ = ["bench_vllm"]

_PLAIN = "vllm, local experts"
_LLAMA = "llama.cpp"
_TOKEN_S = 300.0
_WARM_TOKENS = 16
_MARGIN_TOKENS = 16
# vLLM's processes poll for a second after their last token, and would take the next engine's cores.
_PAUSE_S = 1.5


def bench_vllm(
    model: Path,
    *,
    servers: Sequence[int],
    streams: Sequence[int],
    prompts: Sequence[int],
    max_tokens: int,
    rounds: int,
    vllm_python: Path | None,
    engines: Sequence[str],
    llama: tuple[Path, Path] | None = None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure tokens/s and the time to the first token, and the ratios to plain vLLM.

    The engines take turns in each round, so that a slow minute of the machine meets all of them. Prompts are
    random tokens, the same for all engines and new in each round. `llama` is llama.cpp's server and the
    checkpoint as GGUF; without `vllm_python`, which cannot serve every checkpoint on CPUs, ratios are to it.

    Raises:
        ConfigError: There is no Python with vLLM, no server of llama.cpp, or no GGUF; or neither is given.
        ClusterError: An engine does not start.
    """
    if vllm_python is None and (llama is None or "vllm" in engines):
        raise ConfigError(
            "without vLLM: give --llama-server and --gguf, and --engines transformers"
        )
    if vllm_python is not None and not vllm_python.is_file():
        raise ConfigError(f"--vllm-python {vllm_python}: not there; run `make setup-vllm`")
    for path in llama or ():
        if not path.is_file():
            raise ConfigError(f"{path}: not there; --llama-server and --gguf name files")
    model = model.resolve()
    with ExitStack() as stack:
        urls: dict[str, str] = {}

        def start(name: str, engine: Any) -> None:
            say(f"starting: {name}")
            urls[name] = stack.enter_context(engine)

        if vllm_python is not None:
            start(_PLAIN, plain_vllm(vllm_python, model))
        for engine in engines:
            python = vllm_python if engine == "vllm" and vllm_python else own_python()
            for count in servers:
                name = f"{engine}, {count} expert server{'s' if count > 1 else ''}"
                start(name, cluster(python, model, count, engine))
        if llama is not None:
            tokens = max(prompts) + max_tokens + _MARGIN_TOKENS
            start(_LLAMA, llama_server(*llama, max(streams), tokens))
        vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
        loads = [
            Load(model.name, vocabulary, count, length, max_tokens)
            for length in prompts
            for count in streams
        ]
        rows = [row for load in loads for row in asyncio.run(_measure(urls, load, rounds, say))]
    return {
        "model": model_name(model),
        "max_tokens": max_tokens,
        "rounds": rounds,
        "reference": _PLAIN if vllm_python else _LLAMA,
        "rows": rows,
    }


class Load(NamedTuple):
    """Requests that run at the same time.

    Attributes:
        model: Its name in the API.
        vocabulary: Number of tokens to choose prompts from.
        streams: Requests.
        prompt: Tokens per prompt.
        answer: Tokens per answer.
    """

    model: str
    vocabulary: int
    streams: int
    prompt: int
    answer: int

    def body(self, turn: int, number: int) -> dict[str, Any]:
        """Return the body of one request of a turn."""
        draw = random.Random(f"{self.streams} {self.prompt} {turn} {number}")
        return {
            "model": self.model,
            # The first ones are often special.
            "prompt": [
                draw.randrange(self.vocabulary // 8, self.vocabulary) for _ in range(self.prompt)
            ],
            "max_tokens": self.answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


class Measured(NamedTuple):
    """One turn: tokens/s of all streams from the requests to the last token, and seconds to a first token."""

    tokens_per_s: float
    first_s: float


async def _measure(
    urls: dict[str, str], load: Load, rounds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    found: dict[str, list[Measured]] = {name: [] for name in urls}
    async with httpx.AsyncClient(timeout=_TOKEN_S, trust_env=False) as http:
        for url in urls.values():
            await _run(http, url, load._replace(answer=_WARM_TOKENS), -1)
        for turn in range(rounds):
            say(f"{load.streams} streams, prompts of {load.prompt}, round {turn + 1} of {rounds}")
            for name, url in urls.items():
                await asyncio.sleep(_PAUSE_S)
                found[name].append(await _run(http, url, load, turn))
    reference = found.get(_PLAIN) or found[_LLAMA]
    return [
        {
            "engine": name,
            "streams": load.streams,
            "prompt": load.prompt,
            "tokens_per_s": statistics.median(each.tokens_per_s for each in own),
            "ratio": statistics.median(
                a.tokens_per_s / b.tokens_per_s for a, b in zip(own, reference, strict=True)
            ),
            "first_s": statistics.median(each.first_s for each in own),
            "first_ratio": statistics.median(
                a.first_s / b.first_s for a, b in zip(own, reference, strict=True)
            ),
        }
        for name, own in found.items()
    ]


async def _run(http: httpx.AsyncClient, url: str, load: Load, turn: int) -> Measured:
    """Answer all requests at once. The first token counts: busy cores may deliver several at a time."""
    started = time.monotonic()
    firsts = await asyncio.gather(
        *[_stream(http, url, load.body(turn, number)) for number in range(load.streams)]
    )
    tokens_per_s = load.streams * load.answer / (time.monotonic() - started)
    return Measured(tokens_per_s, statistics.median(firsts) - started)


async def _stream(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> float:
    """Read an answer; return when its first token came, in monotonic seconds."""
    first = 0.0
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not first and line.startswith("data: {"):
                first = time.monotonic()
    return first
