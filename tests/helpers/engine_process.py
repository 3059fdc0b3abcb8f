"""A process with an `EngineService` whose engine says what `engine_sim.next_token` says.

python engine_process.py STEP_S KIND [SECRET]: it prints its port. A request whose first token is 13 kills it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from attention_client.generation.service import EngineService
from eaas.generation.errors import EngineStoppedError
from eaas.generation.matchers import Matchers
from eaas.generation.work import Delivery, Work
from eaas.net.tls import Identity
from engine_sim import next_token

__all__ = ["EngineProcess"]

POISON = 13


class SteppingEngine:
    """An engine with a step of a given time, in which each request gets a token."""

    capacity = 1000

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._lock = threading.Lock()
        self._works: dict[str, tuple[Work, list[int], Callable[[Delivery], None]]] = {}
        self._begun: set[str] = set()
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        if self._is_stopped:
            raise EngineStoppedError("it was shut down")
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._works[work.id] = work, list(work.tokens), deliver

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self._works.pop(request_id, None)

    def failure(self) -> str | None:
        return None

    def running(self) -> int:
        return len(self._works)

    def waiting(self) -> int:
        return 0

    def traced(self) -> Sequence[bytes]:
        return ()

    def cache_usage(self) -> float:
        return 0.25

    def is_compiled(self) -> bool:
        return True

    def stop(self, timeout_s: float) -> None:
        self._is_stopped = True
        error = EngineStoppedError("it was shut down")
        with self._lock:
            for _, _, deliver in self._works.values():
                self._loop.call_soon_threadsafe(deliver, Delivery([], True, error))
            self._works.clear()

    def _run(self) -> None:
        while not self._is_stopped:
            time.sleep(self._step_s)
            with self._lock:
                works = list(self._works.items())
            for name, (work, tokens, deliver) in works:
                if name not in self._begun:
                    self._begun.add(name)
                    self._loop.call_soon_threadsafe(deliver, Delivery([]))
                if work.tokens[0] == POISON:
                    time.sleep(0.05)
                    os.kill(os.getpid(), signal.SIGKILL)
                tokens.append(next_token(tokens, work.prompt_length, work.sampling.seed))
                count = len(tokens) - work.prompt_length
                finished = count >= work.max_tokens or tokens[-1] in work.end_tokens
                if finished:
                    self.cancel(name)
                self._loop.call_soon_threadsafe(deliver, Delivery([tokens[-1]], finished))


class NoMatchers(Matchers):
    """Refuses every grammar."""

    def __init__(self, _threads: Executor) -> None:
        pass

    def of(self, text: str) -> None:  # type: ignore[override]
        raise ValueError(f"no grammar here: {text}")


class EngineProcess:
    """Starts such a process; a context manager.

    Attributes:
        address: host:port.
        process: The process.
    """

    def __init__(
        self, step_s: float = 0.005, kind: str = "model", secret: str = "", tls: Path | None = None
    ) -> None:
        words = [str(step_s), kind, secret, str(tls or "")]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdout is not None
        self.address = f"127.0.0.1:{int(self.process.stdout.readline())}"

    def tell(self, word: str) -> None:
        """Let it "drain" or "stop"."""
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


def main() -> None:
    step_s, kind, secret, tls = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    identity = Identity(Path(tls), "attention-client") if tls else None
    service = EngineService(
        SteppingEngine(float(step_s)),
        "files",
        (kind,),
        NoMatchers,
        listener,
        identity,
        secret or None,
    )
    service.start()
    for line in sys.stdin:
        if line.strip() == "drain":
            service.drain()
            while service.is_busy():
                time.sleep(0.01)
        service.stop()
        return


if __name__ == "__main__":
    main()
