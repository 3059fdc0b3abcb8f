"""Entrants of a comparison: each an endpoint in processes of its own, which end with the context."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import httpx

from eaas.config import load_config
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas_cli.local.arguments import check_endpoint_port

__all__ = ["ROOT", "cluster", "llama_server", "plain_vllm"]

ROOT = Path(__file__).parents[2]
_START_S = 600.0
_END_S = 20.0
_ASK_S = 2.0
# Small caches: several engines share the machine's memory.
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def plain_vllm(python: Path, model: Path) -> Iterator[str]:
    """vLLM with local experts; yields its URL."""
    port = check_endpoint_port("127.0.0.1", 0)
    words = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(model))
    names = ("--served-model-name", model.name)
    where = ("--host", "127.0.0.1", "--port", str(port))
    # Not all of the memory: it is for a machine of its own.
    with _endpoint(
        [str(python), *words, *names, *where, "--gpu-memory-utilization", "0.5"], port
    ) as url:
        yield url


@contextlib.contextmanager
def llama_server(binary: Path, gguf: Path, streams: int, tokens: int) -> Iterator[str]:
    """llama.cpp's server, with a slot of so many tokens for each stream; yields its URL."""
    port = check_endpoint_port("127.0.0.1", 0)
    slots = ("--parallel", str(streams), "--ctx-size", str(streams * tokens))
    cores = str(usable_cores())
    # No copies of finished prompts: none comes again.
    settings = ("--threads", cores, "--flash-attn", "on", "--cache-ram", "0")
    where = ("--host", "127.0.0.1", "--port", str(port))
    words = (str(binary.resolve()), "--model", str(gguf.resolve()))
    with _endpoint([*words, *slots, *settings, *where], port) as url:
        yield url


@contextlib.contextmanager
def cluster(python: Path, model: Path, servers: int, engine: str) -> Iterator[str]:
    """A local cluster, each expert on two servers if there are two; yields the URL of its endpoint."""
    port = check_endpoint_port("127.0.0.1", 0)
    sizes = ("--servers", str(servers), "--redundancy", str(min(servers, 2)))
    words = ("-m", "eaas_cli", "up", "--model", str(model), "--engine", engine, *sizes)
    with _endpoint([str(python), *words, "--port", str(port)], port) as url:
        if engine == "transformers" and load_config().attention_client.compile:
            _wait_until_compiled(url)
        yield url


@contextlib.contextmanager
def _endpoint(command: Sequence[str], port: int) -> Iterator[str]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(os.environ),
            # A group to end, but no session: Linux schedules sessions by turns, and the client would starve.
            process_group=0,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, " ".join(command[:4]), url, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_END_S)


def _wait_until_compiled(url: str) -> None:
    """Wait for the compiled passes; a model that has none is measured uncompiled."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        # While it compiles passes of a large model, it may answer late.
        with contextlib.suppress(httpx.TimeoutException):
            metrics = httpx.get(f"{url}/metrics", timeout=_ASK_S, trust_env=False).text
            if "eaas_passes_compiled 1.0" in metrics:
                return
        time.sleep(0.5)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in given.items() if name != "VIRTUAL_ENV"}
    return _ENVIRONMENT | own


def _wait(process: subprocess.Popen[bytes], what: str, url: str, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["(nothing)"]
            raise ClusterError(f"{what} ended: {lines[-1]}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=_ASK_S, trust_env=False).is_success:
                return
        time.sleep(0.5)
    raise ClusterError(f"{url} does not answer after {_START_S:.0f} s")
