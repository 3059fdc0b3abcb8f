"""An open-loop load: requests come when they come, whatever became of those before."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Sequence

import httpx

from eaas.api_keys import authorization
from eaas.bench.stream import Answer, ask
from eaas.chaos.history import Asked

__all__ = ["OpenLoad", "answers_of"]

# Longer than any layer's deadline: whoever hears nothing for so long was forgotten.
_READ_S = 30.0


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        headers=authorization(),
        timeout=httpx.Timeout(10.0, read=_READ_S),
        limits=httpx.Limits(max_connections=None),
    )


def answers_of(
    base_url: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[Answer, ...]:
    """What a server answers to each prompt, one after another."""

    async def run() -> tuple[Answer, ...]:
        async with _client() as client:
            return tuple([await ask(client, base_url, _body(p, max_tokens)) for p in prompts])

    return asyncio.run(run())


class OpenLoad:
    """Puts a load on an endpoint from a thread of its own, until `stop`.

    Args:
        base_url: Without "/v1".
        prompts: Token ids.
        max_tokens: Of each answer.
        rate: Requests per second on the average; the times between them are exponential.
        seed: Draws times and prompts.
        most_at_once: Requests come later where so many have no end yet; None: they come when they come.
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
        """Requests so far. From any thread."""
        return len(self._asked)

    def stop(self, patience_s: float) -> tuple[Asked, ...]:
        """Ask for nothing more, and wait for what was asked; what has no end by then is given up. Idempotent.

        Returns:
            All requests, in the order in which they were due.
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
        async with _client() as client:
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
                    body = _body(self._prompts[prompt], self._max_tokens)
                    task = asyncio.create_task(ask(client, self._base_url, body))
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
