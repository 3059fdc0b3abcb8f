"""In the balancer: turns servers' token totals into steps, and keeps a window of them for plans. No I/O.

reading   a server's totals since its process started
step      tokens that all servers computed between two readings; steps without tokens are dropped
window    the last steps, oldest first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["HotnessFold", "Reading", "Step", "Window", "Work"]

Counts = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


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

    Args:
        layers, experts: L and E of the model.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = (layers, experts)
        self._known: dict[str, Reading] = {}

    def position(self, server_id: str) -> tuple[int, int]:
        """Return boot id and sequence of a server's last reading, for the next request; (0, 0): none."""
        known = self._known.get(server_id)
        return (known.boot_id, known.sequence) if known else (0, 0)

    def step(self, readings: Mapping[str, Reading]) -> Step:
        """Turn a round of readings into a step: the work since the last reading of each of these servers."""
        tokens_LE = np.zeros(self._shape, np.int64)
        load_L: dict[str, Counts] = {}
        work: dict[str, Work] = {}
        for server_id, reading in readings.items():
            delta = self._delta(server_id, reading)
            if delta is None:
                continue
            new_LE, done = delta
            tokens_LE += new_LE
            load_L[server_id] = new_LE.sum(axis=1)
            work[server_id] = done
        return Step(tokens_LE, load_L, work)

    def _delta(self, server_id: str, reading: Reading) -> tuple[Counts, Work] | None:
        if reading.tokens_LE is not None and reading.tokens_LE.shape != self._shape:
            return None  # The counts are for another model.
        known = self._known.get(server_id)
        nothing_LE = np.zeros(self._shape, np.int64)
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


class Window:
    """A window of the last steps that had tokens. Plans, triggers, knobs and metrics use it.

    Args:
        size: Highest number of steps.
    """

    def __init__(self, size: int) -> None:
        self._steps: deque[Step] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> bool:
        """Add a step, unless it has no tokens; return whether it was added (and counts for the triggers)."""
        if not step.tokens_LE.any():
            return False
        self._steps.append(step)
        return True

    def keep_last(self, steps: int) -> None:
        """Drop all but the last steps: after drift, older ones would mislead the plan."""
        self._steps = deque(tuple(self._steps)[-steps:], maxlen=self._steps.maxlen)

    def tokens_WLE(self, last: int | None = None) -> Counts:
        """int64 (W, L, E): tokens by step, of the last steps or of all. The window must not be empty."""
        return np.stack([step.tokens_LE for step in self._last(last)])

    def tokens_LE(self, last: int | None = None) -> Counts:
        """int64 (L, E): tokens summed over the last steps, or over all. The window must not be empty."""
        return np.asarray(sum(step.tokens_LE for step in self._last(last)))

    def load_LS(self, servers: Iterable[str], last: int | None = None) -> Float:
        """float64 (L, S): (token, expert) pairs that each server computed, in the last steps or in all."""
        steps = self._last(last)
        nothing_L = np.zeros(steps[0].tokens_LE.shape[0], np.int64)
        columns = [
            sum((s.load_L.get(name, nothing_L) for s in steps), nothing_L) for name in servers
        ]
        return np.stack(columns, axis=1).astype(np.float64)

    def work(self, server_id: str) -> list[Work]:
        """Return a server's work by step, for its speed; without the steps in which it did not answer."""
        return [step.work[server_id] for step in self._steps if server_id in step.work]

    def _last(self, steps: int | None) -> tuple[Step, ...]:
        return tuple(self._steps)[-(steps or len(self._steps)) :]
