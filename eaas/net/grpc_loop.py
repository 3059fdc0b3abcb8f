"""The process's event loop for grpc.aio, in its own thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["grpc_loop", "run_on_loop"]

_T = TypeVar("_T")


# `cache` alone may call it twice, from two threads.
_first_use = threading.Lock()


def grpc_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop of grpc.aio; it is created on first use and never closed.

    A process must have only one: grpc.aio has a single event queue and may wake the wrong loop.
    """
    with _first_use:
        return _started()


@functools.cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpc-loop", daemon=True).start()
    return loop


def run_on_loop(coroutine: Coroutine[Any, Any, _T], timeout_s: float | None) -> _T:
    """Run a coroutine on the event loop of grpc.aio and return its result; for any thread except the loop's.

    Args:
        coroutine: Runs on the loop.
        timeout_s: Longest wait; None means no limit.

    Raises:
        TimeoutError: The coroutine did not end in time.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, grpc_loop()).result(timeout_s)
