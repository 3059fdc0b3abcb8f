"""Chooses where the HTTP endpoint reads a request body, so that reading delays no other request's stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from attention_client.serving.api_error import ApiError
from attention_client.serving.heap import trim_heap
from attention_client.serving.prompts.body import Body
from attention_client.serving.prompts.reader import ModelLimits, PromptReader
from attention_client.serving.prompts.worker_process import WorkerProcess

__all__ = ["PromptPool"]

# Up to this size, reading takes less time than a switch to another thread.
_AT_ONCE_BYTES = 2 * 2**10
# JSON, pydantic and templates hold the interpreter's lock, which each step of the engine needs many times.
# A thread may hold it for milliseconds, but megabytes take longer.
_IN_THREAD_BYTES = 64 * 2**10
_IDLE_S = 10.0
_RESTART_S = 30.0

_Request = TypeVar("_Request", bound=Body)
_Result = TypeVar("_Result")


class PromptPool:
    """Reads small bodies at once, other bodies in a thread or in the worker process, one at a time in each.

    The worker starts for the first large body, or if bodies wait for the thread. Then it reads all but the
    small bodies. An idle worker ends, which frees its memory.
    """

    def __init__(self, tokenizer: Any, limits: ModelLimits) -> None:
        self._reader = PromptReader(tokenizer, limits)
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._in_thread = 0  # bodies in the thread
        self._worker = WorkerProcess(tokenizer, limits)
        self._worker_thread = ThreadPoolExecutor(1, "prompt-worker")  # waits for the worker
        self._in_worker = 0
        self._starting: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def read(self, cls: type[_Request], body: bytes) -> tuple[_Request, list[list[int]]]:
        """Read one request body (`PromptReader.read`) where its size allows it to delay nobody.

        Raises ApiError (400, 503).
        """
        if len(body) <= _AT_ONCE_BYTES:
            return self._reader.read(cls, body)
        if self._worker.ready or len(body) > _IN_THREAD_BYTES:
            return await self._ask_worker(self._worker.read, cls, body)
        if self._in_thread and self._starting is None:
            self._starting = asyncio.create_task(self._start_worker())
        self._in_thread += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._reader.read, cls, body)
        finally:
            self._in_thread -= 1

    def close(self) -> None:
        """End the reading threads and the worker process, when the endpoint stops. Waiting reads fail."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._worker_thread.shutdown(wait=False, cancel_futures=True)
        self._worker.close()

    async def _start_worker(self) -> None:
        try:
            await self._ask_worker(self._worker.start)
        except ApiError:
            await asyncio.sleep(_RESTART_S)  # until then the thread reads all bodies
        finally:
            self._starting = None

    async def _ask_worker(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method of the worker process after the queued calls; it ends when it is idle for long."""
        self._in_worker += 1
        if self._idle is not None:
            self._idle.cancel()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._worker_thread, function, *arguments)
        finally:
            self._in_worker -= 1
            if not self._in_worker:
                self._idle = loop.call_later(_IDLE_S, self._stop_when_idle)

    def _stop_when_idle(self) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is closed
            self._worker_thread.submit(self._stop_worker)

    def _stop_worker(self) -> None:
        if not self._in_worker:
            self._worker.stop()
            trim_heap()
