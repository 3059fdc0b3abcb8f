"""Decide whether double-batch overlap is faster, from the times of forward passes with and without it.

Overlap is faster if attention takes about as long as the experts and half a batch takes about half as long.
That depends on the machine, the network, the model and the sequence lengths, so it is measured.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["OverlapChoice"]

# Only this many recent passes count, because sequences grow and servers join and leave.
_WINDOW = 5
# Passes of each mode before the two are compared.
_TRIALS = 3
# After that, every 50th pass uses the slower mode.
_EXPLORE = 50
# Overlap must take less than this share of the whole batch's time, because a smaller gain is noise.
_GAIN = 0.97


class _Record:
    def __init__(self) -> None:
        self.passes = 0
        self.seconds: dict[bool, deque[float]] = {
            overlapped: deque(maxlen=_WINDOW) for overlapped in (False, True)
        }

    def choose(self) -> bool:
        whole, halves = self.seconds[False], self.seconds[True]
        if min(len(whole), len(halves)) < _TRIALS:
            return len(halves) < len(whole)
        better = statistics.median(halves) < _GAIN * statistics.median(whole)
        return better if self.passes % _EXPLORE else not better


class OverlapChoice:
    """Chooses between overlap and whole batches, for one model on one thread. Reads no clock.

    Only passes with a similar number of tokens are compared; passes with one token per sequence are compared
    separately.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[int, bool], _Record] = {}

    def choose(self, tokens: int, sequences: int) -> bool:
        """Return whether to overlap the next forward pass of this size: the faster way, or a trial."""
        return self._record(tokens, sequences).choose()

    def observe(self, tokens: int, sequences: int, overlapped: bool, seconds: float) -> None:
        """Record the time of a forward pass, with or without overlap, for the next choices."""
        record = self._record(tokens, sequences)
        record.passes += 1
        record.seconds[overlapped].append(seconds)

    def _record(self, tokens: int, sequences: int) -> _Record:
        return self._records.setdefault((tokens.bit_length(), tokens == sequences), _Record())
