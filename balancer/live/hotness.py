"""From totals that servers tell to what was computed between two looks, and the last of these. No I/O.

reading   what a server says of its life so far: totals
step      what all servers computed between two looks; a step without a token is none
window    the last steps, oldest first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["HotnessFold", "Reading", "Step", "Window", "Work"]

Counts = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """What a server did.

    Attributes:
        busy_s: Seconds at work.
        batches: Batches.
        visits: Experts that had tokens in a batch, over all batches.
        tokens: (token, expert) pairs.
    """

    busy_s: float = 0.0
    batches: float = 0
    visits: float = 0
    tokens: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.busy_s + other.busy_s,
            self.batches + other.batches,
            self.visits + other.visits,
            self.tokens + other.tokens,
        )

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.busy_s - other.busy_s,
            self.batches - other.batches,
            self.visits - other.visits,
            self.tokens - other.tokens,
        )


@dataclass(frozen=True, eq=False)
class Reading:
    """A server's word (`expert.proto`, ReadHotnessResponse).

    Attributes:
        boot_id, sequence: Of its life, and of its counts.
        tokens_LE: Totals of this life; None where nothing came since the sequence that it was asked with.
        work: Totals.
        carried: Bytes that its machine's network has received and sent.
    """

    boot_id: int
    sequence: int
    tokens_LE: Counts | None
    work: Work
    carried: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class Step:
    """What was computed between two looks.

    Attributes:
        tokens_LE: Of all servers.
        load_L: By server: its tokens in each layer.
        work: By server.
    """

    tokens_LE: Counts
    load_L: Mapping[str, Counts]
    work: Mapping[str, Work]


class HotnessFold:
    """Takes differences, life by life.

    Of a life that nobody knew when its server was first seen, what was before is not counted; of a new
    life of a known server everything is. So an answer that is lost, late or repeated changes nothing in
    the sum, and no restart does.

    Args:
        layers, experts: Of the model.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = (layers, experts)
        self._known: dict[str, Reading] = {}

    def position(self, server_id: str) -> tuple[int, int]:
        """Boot id and sequence to ask with."""
        known = self._known.get(server_id)
        return (known.boot_id, known.sequence) if known else (0, 0)

    def step(self, readings: Mapping[str, Reading]) -> Step:
        """What came since the last look at each of these servers."""
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
            return None  # It is of another model.
        known = self._known.get(server_id)
        nothing_LE = np.zeros(self._shape, np.int64)
        before_LE, before = nothing_LE, Work()
        if known is not None and known.boot_id == reading.boot_id:
            if reading.sequence < known.sequence:
                return None  # An answer that was overtaken: it is in the later one.
            assert known.tokens_LE is not None
            before_LE, before = known.tokens_LE, known.work
        now_LE = before_LE if reading.tokens_LE is None else reading.tokens_LE
        self._known[server_id] = Reading(reading.boot_id, reading.sequence, now_LE, reading.work)
        if known is None:
            return None
        new_LE = now_LE - before_LE
        done = reading.work - before
        return new_LE, Work(done.busy_s, done.batches, done.visits, float(new_LE.sum()))


class Window:
    """The last steps that had tokens.

    Args:
        size: Steps.
    """

    def __init__(self, size: int) -> None:
        self._steps: deque[Step] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: Step) -> bool:
        """Says whether it had tokens."""
        if not step.tokens_LE.any():
            return False
        self._steps.append(step)
        return True

    def keep_last(self, steps: int) -> None:
        """What is older is of another time."""
        self._steps = deque(tuple(self._steps)[-steps:], maxlen=self._steps.maxlen)

    def tokens_WLE(self) -> Counts:
        """int64 (W, L, E). Not of an empty window."""
        return np.stack([step.tokens_LE for step in self._steps])

    def tokens_LE(self, last: int | None = None) -> Counts:
        """int64: the sum over the last steps, or over all. Not of an empty window."""
        return np.asarray(sum(step.tokens_LE for step in self._last(last)))

    def load_LS(self, servers: Iterable[str], last: int | None = None) -> Float:
        """float64 (L, S): tokens that each server computed, in the last steps or in all."""
        steps = self._last(last)
        nothing_L = np.zeros(steps[0].tokens_LE.shape[0], np.int64)
        columns = [
            sum((s.load_L.get(name, nothing_L) for s in steps), nothing_L) for name in servers
        ]
        return np.stack(columns, axis=1).astype(np.float64)

    def work(self, server_id: str) -> list[Work]:
        """What a server did, step by step; steps in which it was not seen are left out."""
        return [step.work[server_id] for step in self._steps if server_id in step.work]

    def _last(self, steps: int | None) -> tuple[Step, ...]:
        return tuple(self._steps)[-(steps or len(self._steps)) :]
