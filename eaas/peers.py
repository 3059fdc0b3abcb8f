"""Learning from the kernel that another process of this host ended."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

__all__ = ["watch_process"]


class _Watcher:
    """One daemon thread that sleeps on the pidfds of all watched processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        threading.Thread(target=self._run, name="peers", daemon=True).start()

    def add(self, pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
        fd = os.pidfd_open(pid)
        with self._lock:
            self._callbacks[fd] = on_exit
        self._epoll.register(fd, select.EPOLLIN)
        return lambda: self._remove(fd)

    def _remove(self, fd: int) -> None:
        with self._lock:
            if self._callbacks.pop(fd, None) is None:
                return
            self._epoll.unregister(fd)
            os.close(fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    on_exit = self._callbacks.get(fd)
                if on_exit is not None:
                    self._remove(fd)
                    on_exit()


_watcher: _Watcher | None = None
_watcher_lock = threading.Lock()


def watch_process(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
    """Call `on_exit` once, from a thread of this module, when process `pid` ends.

    Args:
        pid: A process of this host and pid namespace.
        on_exit: Must not block.

    Returns:
        A function that ends the watch; idempotent.

    Raises:
        ProcessLookupError: There is no such process.
    """
    global _watcher
    with _watcher_lock:
        if _watcher is None:
            _watcher = _Watcher()
    return _watcher.add(pid, on_exit)
