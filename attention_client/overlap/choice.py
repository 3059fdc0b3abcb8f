"""Whether overlap pays, learned from forward passes with and without it.

It pays where attention takes about as long as the experts do, and where half a batch takes about half as
long: that depends on the machine, the network, the model and the lengths of the sequences, so it is measured
and not computed.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

__all__ = ["OverlapChoice", "Size"]

# Newest passes that count: sequences grow, servers come and go.
_WINDOW = 5
# Each way is tried so often before they are compared.
_TRIALS = 3
# Then the other way is tried once in so many passes.
_EXPLORE = 50
# A gain smaller than this is noise, and one batch is simpler than two.
_GAIN = 0.97


class Size(NamedTuple):
    """Forward passes that take about as long.

    Attributes:
        tokens: Bits of their number.
        decode: Whether each sequence has one token.
    """

    tokens: int
    decode: bool

    @staticmethod
    def of(tokens: int, sequences: int) -> Size:
        """Of a batch."""
        return Size(tokens.bit_length(), tokens == sequences)


class _Record:
    def __init__(self) -> None:
        self.passes = 0
        self.seconds: dict[bool, deque[float]] = {
            way: deque(maxlen=_WINDOW) for way in (False, True)
        }

    def next_way(self) -> bool:
        whole, halves = self.seconds[False], self.seconds[True]
        if min(len(whole), len(halves)) < _TRIALS:
            return len(halves) < len(whole)
        better = statistics.median(halves) < _GAIN * statistics.median(whole)
        return better if self.passes % _EXPLORE else not better


class OverlapChoice:
    """Chooses for one model on one thread. Pure: what it knows is what it was told."""

    def __init__(self) -> None:
        self._records: dict[Size, _Record] = {}

    def choose(self, size: Size) -> bool:
        """Whether the next pass of this size is to be overlapped."""
        return self._records.setdefault(size, _Record()).next_way()

    def observe(self, size: Size, overlapped: bool, seconds: float) -> None:
        """A pass took so long."""
        record = self._records.setdefault(size, _Record())
        record.passes += 1
        record.seconds[overlapped].append(seconds)
