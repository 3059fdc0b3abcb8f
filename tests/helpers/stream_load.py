"""A load of streamed greedy completions that must all equal the first answers, and the pauses in them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping

import httpx

from eaas_cli.bench.stream import Answer, ask
from waiting import eventually

__all__ = ["StreamLoad"]


class StreamLoad:
    """Streams, each of which asks its own prompt again and again.

    Attributes:
        answers: Answers so far.
        failures: What was wrong with an answer.
    """

    def __init__(
        self, endpoint: str, streams: int, tokens: int, headers: Mapping[str, str] | None = None
    ) -> None:
        self._endpoint, self._tokens, self._headers = endpoint, tokens, dict(headers or {})
        self._prompts = [list(range(40 + i, 60 + i)) for i in range(streams)]
        self._over = threading.Event()
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        right = asyncio.run(self._firsts())
        assert not any(answer.error for answer in right), right
        self._right = [answer.text for answer in right]

    @property
    def worst_pause_s(self) -> float:
        """Longest time between two pieces of text, or before the first one."""
        firsts = (a.stamps_s[0] - a.sent_s for a in self.answers if a.stamps_s)
        return max((*firsts, *(answer.stall_s for answer in self.answers)), default=0.0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Streams run during the context; none may fail, and all must have another answer after it."""
        thread = threading.Thread(target=lambda: asyncio.run(self._all()))
        thread.start()
        try:
            self._some_more()
            yield
            self._some_more()
        finally:
            self._over.set()
            thread.join()
        assert not self.failures, self.failures

    def _some_more(self) -> None:
        wanted = len(self.answers) + 2 * len(self._prompts)
        eventually(lambda: len(self.answers) >= wanted, 120.0, what="answers")

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(headers=self._headers, timeout=httpx.Timeout(10.0, read=60.0))

    async def _firsts(self) -> list[Answer]:
        async with self._client() as client:
            return [await ask(client, self._endpoint, p, self._tokens) for p in self._prompts]

    async def _all(self) -> None:
        async with self._client() as client:
            await asyncio.gather(*(self._stream(client, i) for i in range(len(self._prompts))))

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._over.is_set():
            answer = await ask(client, self._endpoint, self._prompts[number], self._tokens)
            self.answers.append(answer)
            if answer.error:
                self.failures.append(answer.error)
            elif answer.text != self._right[number]:
                self.failures.append(
                    f"stream {number}: {answer.text!r}, not {self._right[number]!r}"
                )
