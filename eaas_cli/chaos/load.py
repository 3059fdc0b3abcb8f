"""The load of `eaas chaos run`: open-loop, so requests do not wait for earlier answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Sequence

from eaas_cli.bench.stream import Answer, ask, load_client
from eaas_cli.chaos.history import Asked

__all__ = ["OpenLoad", "answers_of"]

# Longer than the deadline of any layer call: a request that is silent for this long is lost.
_READ_S = 30.0


def answers_of(
    base_url: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[Answer, ...]:
    """Send each prompt to the endpoint, one after another; return the answers, for use before the load."""

    async def run() -> tuple[Answer, ...]:
        async with load_client(base_url, _READ_S) as client:
            return tuple([await ask(client, base_url, p, max_tokens) for p in prompts])

    return asyncio.run(run())


class OpenLoad:
    """Sends completion requests to an endpoint from its own thread, until `stop`.

    Args:
        base_url: URL without "/v1".
        rate: Mean requests per second; intervals are exponential.
        seed: Seed of times and prompts.
        most_at_once: Limit of running requests; None: no limit.
    """

    def __init__(
        self,
        base_url: str,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        rate: float,
        seed: int,
        most_at_once: int | None = None,
    ) -> None:
        self._most_at_once = most_at_once
        self._base_url = base_url
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._rate = rate
        self._dice = random.Random(f"{seed} load")
        self._asked: list[tuple[int, float, asyncio.Task[Answer]]] = []
        self._over = threading.Event()
        self._patience_s = 0.0
        self._done: tuple[Asked, ...] = ()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    @property
    def sent(self) -> int:
        """Number of requests sent so far, answered or not. Thread-safe."""
        return len(self._asked)

    def stop(self, patience_s: float) -> tuple[Asked, ...]:
        """Stop sending, give running requests `patience_s` to end, and cancel the rest. Idempotent.

        Returns:
            All requests, in scheduled order.
        """
        self._patience_s = patience_s
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._done

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self._error = error

    async def _all(self) -> None:
        async with load_client(self._base_url, _READ_S) as client:
            due = time.monotonic()
            running: set[asyncio.Task[Answer]] = set()
            while not self._over.is_set():
                due += self._dice.expovariate(self._rate)
                prompt = self._dice.randrange(len(self._prompts))
                while (left := due - time.monotonic()) > 0 and not self._over.is_set():
                    await asyncio.sleep(min(left, 0.1))
                while len(running) == self._most_at_once and not self._over.is_set():
                    await asyncio.wait(running, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                if not self._over.is_set():
                    asking = ask(client, self._base_url, self._prompts[prompt], self._max_tokens)
                    task = asyncio.create_task(asking)
                    running.add(task)
                    task.add_done_callback(running.discard)
                    self._asked.append((prompt, due, task))
            tasks = [task for _, _, task in self._asked]
            if tasks:
                await asyncio.wait(tasks, timeout=self._patience_s)
            self._done = tuple(
                Asked(prompt, due, task.result() if task.done() else None)
                for prompt, due, task in self._asked
            )
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
