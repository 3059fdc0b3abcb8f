"""The floor: a process that only copies, and round trips to it without Python (`_floor.c`)."""

from __future__ import annotations

import mmap
import os
import time
from array import array
from types import TracebackType
from typing import Self

from eaas.bench.dispatch import _floor
from eaas.errors import ClusterError
from eaas.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["Floor", "map_shared", "mapping_bytes"]

_START_S = 60.0
_TIMEOUT_MS = 10_000
_LINE_BYTES = 64
# The server spins for 3 ms after the last request.
_FALLS_ASLEEP_S = 0.005
_LEAST_ROUNDS, _MOST_ROUNDS = 20, 100_000


def mapping_bytes(request_bytes: int, result_bytes: int) -> int:
    """What a request and a result need: a line for the flag, and one for their alignment."""
    return request_bytes + result_bytes + 2 * _LINE_BYTES


def map_shared(fd: int, size: int) -> mmap.mmap:
    """The mapping of either side, with all of its pages present, as an arena's are."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class Floor:
    """The server's process and the memory that it shares with this one; a context manager.

    Args:
        request_bytes, result_bytes: Of the largest round trip.
        cores: Two, one for each side.
    """

    def __init__(self, request_bytes: int, result_bytes: int, cores: tuple[int, int]) -> None:
        self._core = cores[0]
        size = mapping_bytes(request_bytes, result_bytes)
        self._source = bytearray(os.urandom(request_bytes))
        self._destination = bytearray(result_bytes)
        fd = os.memfd_create("eaas-floor", os.MFD_CLOEXEC)
        try:
            # Not ftruncate: without the memory, the process would die of SIGBUS later.
            os.posix_fallocate(fd, 0, size)
            self._mapping = map_shared(fd, size)
            arguments = (os.getpid(), fd, size, result_bytes, cores[1])
            self._child = ChildProcess(
                "floor",
                [str(argument) for argument in arguments],
                None,
                module="eaas.bench.dispatch.floor_process",
            )
            try:
                wait_ready([self._child], _START_S)
            except BaseException:
                stop_all([self._child])
                raise
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop_all([self._child])
        self._mapping.close()

    def turn(self, request_bytes: int, result_bytes: int, seconds: float) -> list[int]:
        """Round trips for about so long; afterwards the server sleeps.

        The first ones do not count: they wake the server, compare digests of all that was copied, and tell
        how many there are to be.

        Returns:
            Nanoseconds of each.

        Raises:
            ClusterError: The server does not answer.
        """
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        try:
            self._call(request_bytes, result_bytes, 1, check=True)
            typical_ns = min(self._call(request_bytes, result_bytes, _LEAST_ROUNDS))
            rounds = int(seconds * 1e9 / typical_ns)
            rounds = min(max(rounds, _LEAST_ROUNDS), _MOST_ROUNDS)
            return self._call(request_bytes, result_bytes, rounds).tolist()
        finally:
            os.sched_setaffinity(0, cores)
            time.sleep(_FALLS_ASLEEP_S)

    def _call(
        self, request_bytes: int, result_bytes: int, rounds: int, *, check: bool = False
    ) -> array[int]:
        took_ns = array("Q", bytes(8 * rounds))
        try:
            _floor.call(
                self._mapping,
                memoryview(self._source)[:request_bytes],
                memoryview(self._destination)[:result_bytes],
                took_ns,
                _TIMEOUT_MS,
                check,
            )
        except TimeoutError as error:
            raise ClusterError(
                f"the floor's server: {error}; its last words: {self._child.last_words()}"
            ) from error
        return took_ns
