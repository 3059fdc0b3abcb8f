"""`eaas vllm` as a process, and concurrent greedy streams from its endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from eaas_cli.chaos.cluster import free_port
from vllm_python import PYTHON, ROOT, environment

__all__ = ["Answer", "Streams", "VllmEndpoint"]

_HOST = "127.0.0.1"
_START_S = 300.0
_END_S = 30.0
_ANSWER_S = 240.0


@dataclass(frozen=True)
class Answer:
    """A whole stream.

    Attributes:
        tokens: Number of tokens that the endpoint counted.
        worst_gap_s: Longest time between two parts of the answer.
    """

    text: str
    tokens: int
    worst_gap_s: float


class Streams:
    """Greedy streams that run at the same time, each in a thread.

    Args:
        tokens: Tokens of each answer.
    """

    def __init__(self, url: str, prompts: Sequence[str], tokens: int) -> None:
        self._url, self._tokens = url, tokens
        self._begun = threading.Semaphore(0)
        self._number = len(prompts)
        self._pool = ThreadPoolExecutor(len(prompts))
        self._running = [self._pool.submit(self._stream, prompt) for prompt in prompts]

    def wait_begun(self) -> None:
        """Wait until each stream has a part of its answer."""
        for _ in range(self._number):
            assert self._begun.acquire(timeout=_ANSWER_S)

    def answers(self) -> list[Answer]:
        """Wait for the ends. A failed request raises."""
        try:
            return [running.result(_ANSWER_S) for running in self._running]
        finally:
            self._pool.shutdown()

    def _stream(self, prompt: str) -> Answer:
        body = {
            "prompt": prompt,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, counted, came = "", 0, list[float]()
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=_ANSWER_S) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                document = json.loads(data)
                assert "error" not in document, document
                if document["choices"]:
                    text += "".join(choice["text"] for choice in document["choices"])
                    came.append(time.monotonic())
                    if len(came) == 1:
                        self._begun.release()
                counted = (document.get("usage") or {}).get("completion_tokens", counted)
        return Answer(text, counted, max(after - before for before, after in pairwise(came)))


class VllmEndpoint:
    """`eaas vllm` of vLLM's Python. Starts at once; `wait_serving` waits until it serves.

    Args:
        log: New file for the output.
        options: vLLM's own options.
    """

    def __init__(self, model: Path, monitor: str, log: Path, *options: str) -> None:
        self._log = log
        port = free_port(_HOST)
        self.url = f"http://{_HOST}:{port}"
        words = ("vllm", str(model), "--join", monitor, "--host", _HOST, "--port", str(port))
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "eaas_cli", *words, "--", *options],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait_serving(self) -> None:
        """Wait until requests are answered."""
        deadline = time.monotonic() + _START_S
        while f"ready at {self.url}" not in self._log.read_text():
            assert self._process.poll() is None, self._log.read_text()[-8000:]
            assert time.monotonic() < deadline, self._log.read_text()[-8000:]
            time.sleep(0.1)

    def min_replicas(self) -> int:
        """Replicas, as vLLM's worker sees them, of the expert with the fewest."""
        page = httpx.get(f"{self.url}/metrics", timeout=20).text
        found = re.search(r"^eaas_min_replicas (\d+)", page, re.MULTILINE)
        return int(found[1]) if found else 0

    def streams(self, prompts: Sequence[str], tokens: int) -> Streams:
        """Start a greedy stream for each prompt."""
        return Streams(self.url, prompts, tokens)

    def end(self) -> None:
        """End vLLM's processes. Idempotent."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # The others follow `eaas vllm`.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
