"""The process's loop for grpc.aio, in a thread of its own."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["grpc_loop", "run_on_loop"]

_T = TypeVar("_T")


@functools.cache
def grpc_loop() -> asyncio.AbstractEventLoop:
    """The loop; it runs.

    One, made when it is first needed and never closed: whatever loops there are, grpc.aio has one queue of
    events for all of them, and tells the wrong ones, too.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpc-loop", daemon=True).start()
    return loop


def run_on_loop(coroutine: Coroutine[Any, Any, _T], timeout_s: float | None) -> _T:
    """What a coroutine returns that runs on the loop; for any thread but the loop's own.

    Args:
        coroutine: To run.
        timeout_s: Longest wait for it; None: it ends by itself.

    Raises:
        TimeoutError: It did not end in time.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, grpc_loop()).result(timeout_s)
