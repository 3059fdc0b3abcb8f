"""The load of a round: parallel streams, each a long greedy answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from eaas.net.api_keys import authorization
from eaas.net.http_client import http_settings
from eaas_cli.bench.stream import Answer, ask

__all__ = ["Round", "Streams"]

_READ_S = 60.0
_AGAIN_S = 0.05


@dataclass
class Round:
    """The result of a round of streams. Times are monotonic seconds.

    Attributes:
        failed: The first error of each failed stream; it was repeated from its beginning until it succeeded.
    """

    began_s: float = 0.0
    ended_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    failed: list[Answer] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last answer."""
        return self.ended_s - self.began_s

    @property
    def tokens(self) -> int:
        """Number of tokens in all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def stall_s(self) -> float:
        """Longest pause within a stream, seconds."""
        return max((answer.stall_s for answer in self.answers), default=0.0)


class Streams:
    """A round that runs in a thread; `result` waits for it.

    Args:
        endpoint: Returns the URL without "/v1"; a restarted cluster has another one.
        prompts: Token ids, one prompt per stream.
    """

    def __init__(
        self, endpoint: Callable[[], str], prompts: Sequence[list[int]], max_tokens: int
    ) -> None:
        self._endpoint = endpoint
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._given_up = threading.Event()
        self._round = Round(began_s=time.monotonic())
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="streams", daemon=True)
        self._thread.start()

    def result(self) -> Round:
        """Wait for the end of the round; return its result."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._round

    def give_up(self) -> None:
        """Cancel the round's streams."""
        self._given_up.set()

    @property
    def running(self) -> bool:
        """Whether streams of the round are still running."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        self._round.ended_s = time.monotonic()

    async def _all(self) -> None:
        timeout = httpx.Timeout(10.0, read=_READ_S)
        async with httpx.AsyncClient(
            **http_settings(self._endpoint()), headers=authorization(), timeout=timeout
        ) as client:
            done = asyncio.gather(*(self._one(client, prompt) for prompt in self._prompts))
            while not done.done():
                await asyncio.wait([done], timeout=0.2)
                if self._given_up.is_set():
                    done.cancel()
                    return
            self._round.answers = done.result()

    async def _one(self, client: httpx.AsyncClient, prompt: list[int]) -> Answer:
        answer = await ask(client, self._endpoint(), prompt, self._max_tokens)
        if answer.error:
            self._round.failed.append(answer)
        while answer.error:
            await asyncio.sleep(_AGAIN_S)
            answer = await ask(client, self._endpoint(), prompt, self._max_tokens)
        return answer
