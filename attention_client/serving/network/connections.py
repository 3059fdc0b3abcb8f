"""The limit of an endpoint's connections, and the choice of the connection to evict."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Protocol

__all__ = ["Connections", "Evictable"]

_LOG = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0


class Evictable(Protocol):
    """A connection that can be closed for another one."""

    def evict(self) -> None:
        """Close it now."""


class Connections:
    """The open connections, at most `most`. A further connection replaces another one.

    Idle connections are evicted first, then those with an incomplete request, the oldest first. A connection
    whose request is being answered is never evicted.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[Evictable] = set()
        # Dictionaries keep the order in which connections entered the state.
        self._idle: dict[Evictable, None] = {}
        self._unfinished: dict[Evictable, None] = {}
        self._closed = Counter[str]()
        self._next_log_s = 0.0

    @property
    def all_busy(self) -> bool:
        """Whether the limit is reached and no connection can be evicted."""
        return len(self._open) >= self.most and not self._idle and not self._unfinished

    def make_room(self) -> bool:
        """Evict a connection if the limit is reached. False: all connections are busy."""
        if len(self._open) < self.most or self.evict_one():
            return True
        self._closed["refused"] += 1
        return False

    def evict_one(self) -> bool:
        """Evict the first candidate. False: there is none."""
        for state, connections in (("idle", self._idle), ("incomplete", self._unfinished)):
            if connections:
                oldest = next(iter(connections))
                self._closed[state] += 1
                oldest.evict()
                self.remove(oldest)
                return True
        return False

    def add(self, connection: Evictable) -> None:
        """Add a connection. It can be evicted after a call of `reads` or `idles`."""
        self._open.add(connection)

    def reads(self, connection: Evictable) -> None:
        """The connection waits for the rest of a request."""
        self._idle.pop(connection, None)
        if connection in self._open:
            self._unfinished[connection] = None

    def answers(self, connection: Evictable) -> None:
        """The connection's request is complete and is being answered."""
        self._idle.pop(connection, None)
        self._unfinished.pop(connection, None)

    def idles(self, connection: Evictable) -> None:
        """The connection's answer is complete."""
        self._unfinished.pop(connection, None)
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Evictable) -> None:
        """Remove a connection that is closed or being closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._unfinished.pop(connection, None)

    def log(self) -> None:
        """Log the evictions, at most one line a minute. Call it about once a second."""
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
