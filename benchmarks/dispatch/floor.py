"""The floor: round trips in C to another thread that only copies bytes (`harness/_floor.c`)."""

from __future__ import annotations

import mmap
import os
from array import array

from benchmarks.harness import _floor
from benchmarks.harness.ratios import Turn

__all__ = ["Floor", "shared_bytes"]

_LINE_BYTES = 64
_MOST_ROUNDS = 100_000


def shared_bytes(request_bytes: int, result_bytes: int) -> int:
    """Size of the shared memory: request, result, a cache line for the flag and one for alignment."""
    return request_bytes + result_bytes + 2 * _LINE_BYTES


class Floor:
    """The memory of the two sides, for round trips of several sizes.

    Args:
        request_bytes, result_bytes: Sizes of the largest round trip.
        cores: One core for each side.
    """

    def __init__(self, request_bytes: int, result_bytes: int, cores: tuple[int, int]) -> None:
        self._cores = cores
        self._source, self._answer = os.urandom(request_bytes), os.urandom(result_bytes)
        self._destination = bytearray(result_bytes)
        # As in an arena: shared, with all its pages present.
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._shared = mmap.mmap(-1, shared_bytes(request_bytes, result_bytes), flags=flags)

    def turn(self, request_bytes: int, result_bytes: int, seconds: float) -> Turn:
        """Make round trips for about `seconds`, at least 20, with each side on its core."""
        took_ns = array("Q", bytes(8 * _MOST_ROUNDS))
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._cores[0]})
        try:
            rounds = _floor.round_trips(
                self._shared,
                memoryview(self._source)[:request_bytes],
                memoryview(self._answer)[:result_bytes],
                memoryview(self._destination)[:result_bytes],
                took_ns,
                self._cores[1],
                int(seconds * 1e9),
            )
        finally:
            os.sched_setaffinity(0, cores)
        return Turn.of(took_ns[:rounds])
