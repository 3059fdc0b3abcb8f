"""The connections of an endpoint: how many there may be, and which one ends when another one comes."""

from __future__ import annotations

import logging
import time
from typing import Protocol

__all__ = ["Connections", "Evictable"]

_LOG = logging.getLogger(__name__)
_LINE_EVERY_S = 60.0


class Evictable(Protocol):
    """A connection that can be closed to make room for another one."""

    def evict(self) -> None:
        """Close it now."""


class Connections:
    """The open connections, at most `most`. One that comes beyond that takes the place of another.

    First go those that wait for their next request, then those whose request is not complete, each time the
    oldest. A connection whose request is being answered stays.

    Args:
        most: Connections that may be open.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[Evictable] = set()
        # Dictionaries keep the order in which connections came to this state.
        self._idle: dict[Evictable, None] = {}
        self._unfinished: dict[Evictable, None] = {}
        self._evicted_idle = self._evicted_unfinished = self._refused = 0
        self._next_line_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def all_busy(self) -> bool:
        """Whether there is no place for another connection: every one is being answered."""
        return len(self._open) >= self.most and not self._idle and not self._unfinished

    def make_room(self) -> bool:
        """Close a connection if there are too many for another one. False: all are being answered."""
        if len(self._open) < self.most:
            return True
        if not self.evict_one():
            self._refused += 1
            return False
        return True

    def evict_one(self) -> bool:
        """Close the connection that can go first; False where none can."""
        for waiting in (self._idle, self._unfinished):
            if waiting:
                oldest = next(iter(waiting))
                if waiting is self._idle:
                    self._evicted_idle += 1
                else:
                    self._evicted_unfinished += 1
                oldest.evict()
                self.remove(oldest)
                return True
        return False

    def add(self, connection: Evictable) -> None:
        """Count a connection; it can be closed only once `reads` or `idles` names it."""
        self._open.add(connection)

    def reads(self, connection: Evictable) -> None:
        """The connection's next request is not complete."""
        self._idle.pop(connection, None)
        if connection in self._open:
            self._unfinished[connection] = None

    def answers(self, connection: Evictable) -> None:
        """The connection's request is complete and being answered."""
        self._idle.pop(connection, None)
        self._unfinished.pop(connection, None)

    def idles(self, connection: Evictable) -> None:
        """The connection's answer is complete."""
        self._unfinished.pop(connection, None)
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Evictable) -> None:
        """The connection is closed, or about to be."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._unfinished.pop(connection, None)

    def log(self) -> None:
        """Say what was closed, at most one line a minute. To be called every second or so."""
        closed = self._evicted_idle + self._evicted_unfinished
        if not closed + self._refused or time.monotonic() < self._next_line_s:
            return
        _LOG.warning(
            "more than %d connections at once: closed %d idle ones and %d with an unfinished request, "
            "refused %d new ones; the limit of open files (ulimit -n) says how many there may be",
            self.most,
            self._evicted_idle,
            self._evicted_unfinished,
            self._refused,
        )
        self._evicted_idle = self._evicted_unfinished = self._refused = 0
        self._next_line_s = time.monotonic() + _LINE_EVERY_S
