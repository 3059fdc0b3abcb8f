"""In the balancer: turns servers' token totals into steps, for `LoadState`. No I/O.

reading   a server's totals since its process started
step      tokens that all servers computed between two readings
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["HotnessFold", "Reading", "Step", "Work"]

Counts = npt.NDArray[np.int64]


class Work(NamedTuple):
    """Work of a server over some time.

    Attributes:
        busy_s: Busy seconds.
        batches: Number of batches.
        visits: Experts that had tokens in a batch, over all batches.
        tokens: (token, expert) pairs.
    """

    busy_s: float = 0.0
    batches: float = 0
    visits: float = 0
    tokens: float = 0


@dataclass(frozen=True, eq=False)
class Reading:
    """A server's answer (`expert.proto`, ReadHotnessResponse).

    Attributes:
        boot_id, sequence: Identify the server's process and its counts.
        tokens_LE: Totals of this process; None: unchanged since the sequence in the request.
        work: Totals.
        carried: Bytes that the machine's network interfaces have received and sent.
    """

    boot_id: int
    sequence: int
    tokens_LE: Counts | None
    work: Work
    carried: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Step:
    """Work of all servers between two readings.

    Attributes:
        tokens_LE: Sum over servers.
        load_L: By server: its tokens in each layer.
        work: By server.
    """

    tokens_LE: Counts
    load_L: Mapping[str, Counts]
    work: Mapping[str, Work]


class HotnessFold:
    """Turns the servers' totals into steps by taking differences, process by process.

    The first totals of an unknown server do not count; all totals of a known server's new process do. So
    lost, late or repeated answers and restarts do not change the sum.
    """

    def __init__(self) -> None:
        self._known: dict[str, Reading] = {}

    def position(self, server_id: str) -> tuple[int, int]:
        """Return boot id and sequence of a server's last reading, for the next request; (0, 0): none."""
        known = self._known.get(server_id)
        return (known.boot_id, known.sequence) if known else (0, 0)

    def step(self, readings: Mapping[str, Reading], shape: tuple[int, int]) -> Step:
        """Turn a round of readings into a step: the work since the last reading of each of these servers.

        `shape` has L and E of the model; readings of another model do not count.
        """
        tokens_LE = np.zeros(shape, np.int64)
        load_L: dict[str, Counts] = {}
        work: dict[str, Work] = {}
        for server_id, reading in readings.items():
            if reading.tokens_LE is not None and reading.tokens_LE.shape != shape:
                continue
            delta = self._delta(server_id, reading, np.zeros(shape, np.int64))
            if delta is None:
                continue
            new_LE, done = delta
            tokens_LE += new_LE
            load_L[server_id] = new_LE.sum(axis=1)
            work[server_id] = done
        return Step(tokens_LE, load_L, work)

    def _delta(
        self, server_id: str, reading: Reading, nothing_LE: Counts
    ) -> tuple[Counts, Work] | None:
        known = self._known.get(server_id)
        before_LE, before = nothing_LE, Work()
        if known is not None and known.boot_id == reading.boot_id:
            if reading.sequence < known.sequence:
                return None  # A later answer has arrived already, and includes this one.
            assert known.tokens_LE is not None
            before_LE, before = known.tokens_LE, known.work
        now_LE = before_LE if reading.tokens_LE is None else reading.tokens_LE
        self._known[server_id] = Reading(reading.boot_id, reading.sequence, now_LE, reading.work)
        if known is None:
            return None
        new_LE = now_LE - before_LE
        done = Work(*map(sub, reading.work, before))
        return new_LE, done._replace(tokens=float(new_LE.sum()))
