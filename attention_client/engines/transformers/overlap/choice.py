"""Decide whether overlap pays, from the times of forward passes with and without it.

Overlap pays if attention takes about as long as the experts and half a batch takes about half as long. That
depends on the machine, the network, the model and the sequence lengths, so it is measured.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

__all__ = ["OverlapChoice", "Size"]

# Recent passes that count: sequences grow, servers come and go.
_WINDOW = 5
# Passes of each mode before the two are compared.
_TRIALS = 3
# After that, every 50th pass uses the slower mode.
_EXPLORE = 50
# Overlap must take less than this share of the time: a smaller gain is noise.
_GAIN = 0.97


class Size(NamedTuple):
    """Class of forward passes that take about the same time.

    Attributes:
        tokens: Bit length of the number of tokens.
        decode: Whether each sequence has one token.
    """

    tokens: int
    decode: bool

    @staticmethod
    def of(tokens: int, sequences: int) -> Size:
        """The class of a batch."""
        return Size(tokens.bit_length(), tokens == sequences)


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
    """Chooses between overlap and whole batches, for one model on one thread. Reads no clock."""

    def __init__(self) -> None:
        self._records: dict[Size, _Record] = {}

    def choose(self, size: Size) -> bool:
        """Whether to overlap the next pass of this size."""
        return self._records.setdefault(size, _Record()).choose()

    def observe(self, size: Size, overlapped: bool, seconds: float) -> None:
        """Record the time of a pass."""
        record = self._records.setdefault(size, _Record())
        record.passes += 1
        record.seconds[overlapped].append(seconds)
