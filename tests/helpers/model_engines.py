"""Engines of real models, each in a process of its own, which can die at a given token.

The fork server starts this module, which reads lines "CHECKPOINT TOKENS" and answers "PORT PID". Each is a
fork that serves the model, and kills itself once it has delivered so many tokens of one request; 0: once it
computes one; -1: never. SIGTERM drains it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from eaas.generation.work import Delivery, Work
from eaas.launcher_pipe import READY_VARIABLE
from eaas_cli.local.fork_server import ForkServer

__all__ = ["ModelEngine", "ModelEngines"]

_PR_SET_PDEATHSIG = 1
# So that what was delivered has left the process before it dies.
_LAST_WORDS_S = 0.02


class ModelEngine:
    """One of the engines.

    Attributes:
        address: host:port.
    """

    def __init__(self, address: str, pid: int) -> None:
        self.address, self._pid = address, pid

    def signal(self, number: int) -> None:
        """Send it a signal; no effect if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return Path(f"/proc/{self._pid}").exists()


class ModelEngines:
    """Starts engines within milliseconds, because it loads each checkpoint once; a context manager."""

    def __init__(self, fork_server: ForkServer) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = fork_server.fork("model_engines", (), 2, theirs.fileno())
            self._lines = ours.makefile("rw")
        self._started: list[ModelEngine] = []

    def start(self, checkpoint: Path, tokens: int = -1) -> ModelEngine:
        """Start an engine that dies at the given token of an answer."""
        print(checkpoint, tokens, file=self._lines, flush=True)
        port, pid = self._lines.readline().split()
        self._started.append(ModelEngine(f"127.0.0.1:{port}", int(pid)))
        return self._started[-1]

    def end_all(self) -> None:
        """Kill all engines."""
        for each in self._started:
            each.signal(signal.SIGKILL)
        self._started.clear()

    def __enter__(self) -> ModelEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()
        self._lines.close()
        self._process.wait(10)


class Mortal:
    """An engine that kills its process once it has delivered so many tokens of a request."""

    def __init__(self, engine: Any, tokens: int) -> None:
        self._engine, self._tokens = engine, tokens
        self._dies = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        said = 0

        def deliver_or_die(delivery: Delivery) -> None:
            nonlocal said
            if self._dies:
                return
            said += len(delivery.tokens)
            if said > self._tokens >= 0:
                self._die()
                return
            deliver(delivery)
            if said == self._tokens:
                self._die()

        self._engine.submit(work, deliver_or_die)

    def _die(self) -> None:
        self._dies = True
        loop = asyncio.get_running_loop()
        loop.call_later(_LAST_WORDS_S, os.kill, os.getpid(), signal.SIGKILL)


def _serve(model: Any, tokenizer: Any, path: Path, listener: socket.socket, tokens: int) -> None:
    from prometheus_client import CollectorRegistry

    from attention_client.generation.service import EngineService
    from attention_client.generation.sizes import EngineSizes
    from eaas.checkpoint.client_digest import client_digest
    from eaas.checkpoint.tokenizer import end_tokens
    from eaas.generation.matchers import Matchers
    from eaas_cli.bench.baseline import local_engine

    # Prompts are computed in parts, and answers cross the borders of blocks.
    sizes = EngineSizes(num_blocks=256, page_size=8, max_batch_tokens=32)
    vocabulary = model.config.get_text_config().vocab_size
    ends = end_tokens(model.generation_config, tokenizer, vocabulary)
    service = EngineService(
        Mortal(local_engine(model, sizes, CollectorRegistry()), tokens),
        client_digest(path),
        (str(path),),
        partial(Matchers, tokenizer, vocabulary, ends),
        listener,
    )
    service.start()
    signal.signal(signal.SIGTERM, lambda *_: service.drain())
    threading.Event().wait()


def main() -> None:
    import torch

    from eaas.checkpoint.tokenizer import load_tokenizer
    from eaas_cli.bench.baseline import load_baseline

    torch.set_num_threads(1)
    # The kernel reaps the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    models: dict[str, tuple[Any, Any]] = {}
    lines = socket.socket(fileno=int(os.environ[READY_VARIABLE])).makefile("rw")
    for line in lines:
        path, tokens = line.split()
        if path not in models:
            models[path] = load_baseline(Path(path), "kernels", 1)[0], load_tokenizer(Path(path))
        listener = socket.create_server(("127.0.0.1", 0))
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _serve(*models[path], Path(path), listener, int(tokens))
        print(listener.getsockname()[1], pid, file=lines, flush=True)
        listener.close()


if __name__ == "__main__":
    main()
