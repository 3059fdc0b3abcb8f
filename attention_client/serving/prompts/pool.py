"""Chooses where the HTTP endpoint reads a request body, so that reading delays no other request's stream."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from attention_client.serving.prompts.body import RequestT
from attention_client.serving.prompts.reader import ModelLimits, PromptReader
from attention_client.serving.prompts.worker_process import WorkerProcess

__all__ = ["PromptPool"]

# Up to this size, reading takes less time than a switch to another thread.
_AT_ONCE_BYTES = 2 * 2**10
# JSON, pydantic and templates hold the interpreter's lock, which each step of the engine needs many times.
# A thread may hold it for milliseconds, but megabytes take longer.
_IN_THREAD_BYTES = 64 * 2**10
_IDLE_S = 10.0


class PromptPool:
    """Reads small bodies at once, larger ones in a thread, large ones in a process, one at a time in each.

    The process starts for the first large body. When it is idle it ends, which frees its memory.
    """

    def __init__(self, tokenizer: Any, limits: ModelLimits) -> None:
        self._reader = PromptReader(tokenizer, limits)
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._worker = WorkerProcess(tokenizer, limits)
        self._worker_thread = ThreadPoolExecutor(1, "prompt-worker")  # waits for the worker
        self._idle: asyncio.TimerHandle | None = None

    async def read(self, cls: type[RequestT], body: bytes) -> tuple[RequestT, list[list[int]]]:
        """Read one request body (`PromptReader.read`) where its size allows it to delay nobody.

        Raises ApiError (400, 503).
        """
        if len(body) <= _AT_ONCE_BYTES:
            return self._reader.read(cls, body)
        loop = asyncio.get_running_loop()
        if len(body) <= _IN_THREAD_BYTES:
            return await loop.run_in_executor(self._thread, self._reader.read, cls, body)
        try:
            return await loop.run_in_executor(self._worker_thread, self._worker.read, cls, body)
        finally:
            if self._idle is not None:
                self._idle.cancel()
            self._idle = loop.call_later(_IDLE_S, self._end_worker)

    def close(self) -> None:
        """End the reading threads and the worker process, when the endpoint stops. Waiting reads fail."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._worker_thread.shutdown(wait=False, cancel_futures=True)
        self._worker.close()

    def _end_worker(self) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is closed
            self._worker_thread.submit(self._worker.stop)
