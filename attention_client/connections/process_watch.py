"""Tell a client at once that an expert server's process on its host has ended (for transport `shm`)."""

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
        threading.Thread(target=self._run, name="process-watch", daemon=True).start()

    def add(self, pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
        fd = os.pidfd_open(pid)
        with self._lock:
            self._callbacks[fd] = on_exit
            self._epoll.register(fd, select.EPOLLIN)

        def end() -> None:
            with self._lock:
                # The descriptor may have been closed and reused by another watch.
                if self._callbacks.get(fd) is on_exit:
                    self._forget(fd)

        return end

    def _forget(self, fd: int) -> Callable[[], None]:
        """Remove a watch, close its pidfd and return its callback; the lock is held."""
        self._epoll.unregister(fd)
        os.close(fd)
        return self._callbacks.pop(fd)

    def _run(self) -> None:
        while True:
            self._epoll.poll()
            with self._lock:
                # Poll again under the lock, because a descriptor may belong to another watch by now.
                ended = [self._forget(fd) for fd, _ in self._epoll.poll(0)]
            for on_exit in ended:
                # Use a thread each, because a callback that blocks or raises must not end the other watches.
                threading.Thread(target=on_exit, name="process-ended", daemon=True).start()


_watcher: _Watcher | None = None
_watcher_lock = threading.Lock()


def watch_process(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
    """Call `on_exit` once, in its own thread, when process `pid` ends; tells `shm` that its server died.

    Args:
        pid: A process on this host and in this pid namespace.
        on_exit: A function object that no other watch uses.

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
