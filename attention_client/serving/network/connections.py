"""The limit of the HTTP endpoint's connections, and the choice of the connection to evict."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Protocol

__all__ = ["Connections", "Evictable"]

_LOG = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0
# A request has this long to arrive before its connection may be evicted, because in a burst whole requests
# wait in the kernel's buffers.
_GRACE_S = 0.5


class Evictable(Protocol):
    """A connection that can be closed for another one."""

    def evict(self) -> None:
        """Close the connection now, to make room for another one."""


class Connections:
    """The open HTTP connections, at most `most`. A further one replaces another, or is refused.

    Idle connections are evicted first, then those with an incomplete request, the oldest first. A connection
    whose request is being answered is never evicted.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[Evictable] = set()
        # Dictionaries keep the order in which connections entered the state.
        self._idle: dict[Evictable, None] = {}
        self._unfinished: dict[Evictable, float] = {}  # and when: monotonic seconds
        self._closed = Counter[str]()
        self._next_log_s = 0.0

    @property
    def all_busy(self) -> bool:
        """Whether the limit is reached and none can be evicted; new ones then wait a second in the kernel."""
        return len(self._open) >= self.most and self._candidate() is None

    def make_room(self) -> bool:
        """Evict a connection if the limit is reached. False: all are busy, so the new one is refused."""
        if len(self._open) < self.most or self.evict_one():
            return True
        self._closed["refused"] += 1
        return False

    def evict_one(self) -> bool:
        """Close the connection that is first to evict, to free its descriptor. False: there is none."""
        found = self._candidate()
        if found is None:
            return False
        state, oldest = found
        self._closed[state] += 1
        oldest.evict()
        self.remove(oldest)
        return True

    def _candidate(self) -> tuple[str, Evictable] | None:
        """Return the state and the connection that is evicted next; None: no connection can be evicted."""
        if self._idle:
            return "idle", next(iter(self._idle))
        for oldest, began_s in self._unfinished.items():
            return ("incomplete", oldest) if time.monotonic() >= began_s + _GRACE_S else None
        return None

    def add(self, connection: Evictable) -> None:
        """Count a new connection as open. It can be evicted after a call of `reads` or `idles`."""
        self._open.add(connection)

    def reads(self, connection: Evictable) -> None:
        """Let a connection be evicted after a short grace: it waits for a request, or for more of one."""
        self._idle.pop(connection, None)
        if connection in self._open:
            # Kept when more of the request arrives, so that a slow sender does not become younger.
            self._unfinished.setdefault(connection, time.monotonic())

    def answers(self, connection: Evictable) -> None:
        """Protect a connection from eviction: its request is complete and is being answered."""
        self._idle.pop(connection, None)
        self._unfinished.pop(connection, None)

    def idles(self, connection: Evictable) -> None:
        """Let a connection be evicted before those with an incomplete request: its answer is complete."""
        self._unfinished.pop(connection, None)
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Evictable) -> None:
        """Stop counting a connection that is closed or being closed, which makes room for another one."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._unfinished.pop(connection, None)

    def log(self) -> None:
        """Log evicted and refused HTTP connections, at most one line a minute; called each second."""
        if not self._closed or time.monotonic() < self._next_log_s:
            return
        _LOG.warning(
            "more than %d connections at once: closed %d idle ones and %d with an incomplete request, "
            "refused %d new ones; raise the limit of open files (ulimit -n) to allow more",
            self.most,
            *(self._closed[kind] for kind in ("idle", "incomplete", "refused")),
        )
        self._closed.clear()
        self._next_log_s = time.monotonic() + _LOG_EVERY_S
