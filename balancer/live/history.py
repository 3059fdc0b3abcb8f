"""The balancer's history of decisions: what changed, why, and the outcome of the roll-out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy

from balancer.planner.candidates import Candidate
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

__all__ = ["MOST_ENTRIES", "History"]

MOST_ENTRIES = 200
"""Number of entries kept."""


class History:
    """Entries for past decisions, and the entry being rolled out; for operators and the record. Thread-safe.

    Args:
        on_entry: Called with each new entry, and again when its roll-out is over.
        on_wanted: Called when the roll-out of another placement begins.
        clock: Monotonic seconds.
        wall_clock: Seconds since 1970, for people.
    """

    def __init__(
        self,
        on_entry: Callable[[pb.HistoryEntry], None] = lambda _entry: None,
        on_wanted: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._on_entry = on_entry
        self._on_wanted = on_wanted
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._entries: deque[pb.HistoryEntry] = deque(maxlen=MOST_ENTRIES)
        self._number = 0
        # The entry being rolled out, with its remaining stages in `_stages`.
        self._open: pb.HistoryEntry | None = None
        self._stages: list[Candidate] = []
        self._since = 0.0
        self._is_first = False
        self._wanted: Placement | None = None
        self._published = 0  # epoch of the last published placement

    @property
    def wanted(self) -> Placement | None:
        """The placement whose roll-out began last, for the record: a successor's recovery keeps it."""
        return self._wanted

    def restore(self, entries: Iterable[pb.HistoryEntry]) -> None:
        """Add the previous balancer's entries from its record, the oldest first."""
        with self._lock:
            self._entries.extend(entries)
            self._number = self._entries[-1].number if self._entries else 0
            done = (e.epoch for e in reversed(self._entries) if e.epoch and not e.given_up)
            self._published = next(done, 0)
            # With past entries, the first placement from now on recovers a running cluster.
            self._is_first = bool(self._entries)

    def entries(self, limit: int = 0) -> list[pb.HistoryEntry]:
        """Return copies of the entries, the newest first; at most `limit`, or all if it is 0."""
        with self._lock:
            newest = list(self._entries)[::-1]
            return [deepcopy(entry) for entry in newest[: limit or len(newest)]]

    def decided(self, entry: pb.HistoryEntry, stages: Sequence[Candidate] = ()) -> None:
        """Record a decision of the rebalancer, an operator or the control loop.

        `stages` are the candidate placements given to the planner for it; none: nothing is rolled out.
        """
        with self._lock:
            if stages:
                self._give_up("another one was decided")
                self._open, self._stages = entry, list(stages)
            self._add(entry)
        self._on_entry(entry)

    def phase(self, phase: str, placement: Placement) -> None:
        """Record a phase of a placement's roll-out (see `Rollout`); called on the planner's thread."""
        with self._lock:
            now = self._clock()
            changed = None
            if phase == "prepare":
                self._wanted = placement
                if self._stages and self._stages[0].holds_LSE is placement.holds_LSE:
                    del self._stages[0]
                else:
                    changed = self._membership_change(placement)
                assert self._open is not None
                self._open.epoch = placement.epoch
            elif self._open is not None and self._open.epoch == placement.epoch:
                if phase == "retire":
                    self._open.prepare_s += now - self._since
                else:
                    self._open.retire_s += now - self._since
                    if not self._stages:
                        changed, self._open = self._open, None
            if phase == "retire":
                self._published = placement.epoch
            self._since = now
        if changed is not None:
            self._on_entry(changed)
        if phase == "prepare":
            self._on_wanted()

    def _membership_change(self, placement: Placement) -> pb.HistoryEntry:
        """Open an entry for a placement that the planner began by itself: servers joined, left or died."""
        self._give_up("servers came, left or died meanwhile")
        trigger, reason = "membership", "for the servers " + ", ".join(placement.servers)
        if self._is_first:
            trigger = "recovery"
        self._open = pb.HistoryEntry(
            trigger=trigger,
            verdict=pb.VERDICT_MOVES,
            reason=reason,
            epoch_before=self._published,
            epoch=placement.epoch,
        )
        self._add(self._open)
        return self._open

    def _give_up(self, why: str) -> None:
        if self._open is not None:
            self._open.given_up = why
        self._open = None
        self._stages = []

    def _add(self, entry: pb.HistoryEntry) -> None:
        self._is_first = False
        self._number += 1
        entry.number = self._number
        entry.unix_ms = int(self._wall_clock() * 1e3)
        self._entries.append(entry)
