"""Where the bodies of requests are read, so that no other request's stream waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from attention_client.serve.api_error import ApiError
from attention_client.serve.heap import trim_heap
from attention_client.serve.prompts.reader import ModelLimits, PromptReader
from attention_client.serve.prompts.worker_process import WorkerProcess
from attention_client.serve.requests import GenerationRequest

__all__ = ["PromptPool"]

# A body of this size is read sooner than another thread takes over.
_AT_ONCE_BYTES = 2 * 2**10
# JSON, pydantic and templates hold the interpreter's lock, which each step of the engine needs many times.
# A thread may hold it for milliseconds, but not for as long as megabytes take.
_IN_THREAD_BYTES = 64 * 2**10
_IDLE_S = 10.0
_RESTART_S = 30.0

_Request = TypeVar("_Request", bound=GenerationRequest)
_Result = TypeVar("_Result")


class PromptPool:
    """Reads small bodies at once, others in a thread or in the worker: one at a time in each.

    The worker is a process. It starts for the first large body, or when bodies wait for the thread, and then
    reads all but the small bodies. It ends, and frees its memory, when it has had nothing to do for a while.

    Args:
        tokenizer: A transformers tokenizer.
        limits: What prompts must keep to.
        idle_s: The worker ends when it has had nothing to do for so long.
    """

    def __init__(self, tokenizer: Any, limits: ModelLimits, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._reader = PromptReader(tokenizer, limits)
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._in_thread = 0  # bodies there
        self.worker = WorkerProcess(tokenizer, limits)
        self._worker_thread = ThreadPoolExecutor(1, "prompt-worker")  # waits for the worker
        self._in_worker = 0
        self._starting: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def read(self, cls: type[_Request], body: bytes) -> tuple[_Request, list[int]]:
        """See `PromptReader.read`. Raises ApiError (400, 503)."""
        if len(body) <= _AT_ONCE_BYTES:
            return self._reader.read(cls, body)
        if self.worker.ready or len(body) > _IN_THREAD_BYTES:
            return await self._ask_worker(self.worker.read, cls, body)
        if self._in_thread and self._starting is None:
            self._starting = asyncio.create_task(self._start_worker())
        self._in_thread += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._reader.read, cls, body)
        finally:
            self._in_thread -= 1

    def close(self) -> None:
        """Ends threads and worker. What they read fails."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._worker_thread.shutdown(wait=False, cancel_futures=True)
        self.worker.close()

    async def _start_worker(self) -> None:
        try:
            await self._ask_worker(self.worker.start)
        except ApiError:
            await asyncio.sleep(_RESTART_S)  # the thread goes on alone
        finally:
            self._starting = None

    async def _ask_worker(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls a method of the worker, after the calls that wait already."""
        self._in_worker += 1
        if self._idle is not None:
            self._idle.cancel()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._worker_thread, function, *arguments)
        finally:
            self._in_worker -= 1
            if not self._in_worker:
                self._idle = loop.call_later(self._idle_s, self._let_go)

    def _let_go(self) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is closed
            self._worker_thread.submit(self._stop_worker)

    def _stop_worker(self) -> None:
        if not self._in_worker:
            self.worker.stop()
            trim_heap()
