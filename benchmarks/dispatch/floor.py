"""The floor: round trips in C to a process that only copies bytes (`harness/_floor.c`).

`python -m benchmarks.dispatch.floor PID FD SIZE RESULT_BYTES CORE` is that process.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from array import array
from typing import Self

from benchmarks.harness import _floor
from benchmarks.harness.ratios import Turn
from eaas.errors import ClusterError
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["Floor", "main", "mapping_bytes"]

_START_S = 60.0
_TIMEOUT_MS = 10_000
_LINE_BYTES = 64
# Pause after a turn until the floor's server sleeps. It spins for 3 ms after the last request.
_FALLS_ASLEEP_S = 0.005
_LEAST_ROUNDS, _MOST_ROUNDS = 20, 100_000


def mapping_bytes(request_bytes: int, result_bytes: int) -> int:
    """Size of the shared memory: request, result, a cache line for the flag and one for alignment."""
    return request_bytes + result_bytes + 2 * _LINE_BYTES


def _map_shared(fd: int, size: int) -> mmap.mmap:
    """Map the shared memory of the floor with all its pages present, as in an arena."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class Floor:
    """The floor's server process and the shared memory; a context manager.

    Args:
        request_bytes, result_bytes: Sizes of the largest round trip.
        cores: One core for each side.
    """

    def __init__(self, request_bytes: int, result_bytes: int, cores: tuple[int, int]) -> None:
        self._core = cores[0]
        size = mapping_bytes(request_bytes, result_bytes)
        self._source = bytearray(os.urandom(request_bytes))
        self._destination = bytearray(result_bytes)
        fd = os.memfd_create("eaas-floor", os.MFD_CLOEXEC)
        try:
            # posix_fallocate instead of ftruncate, with which a lack of memory would be a SIGBUS later.
            os.posix_fallocate(fd, 0, size)
            self._mapping = _map_shared(fd, size)
            arguments = (os.getpid(), fd, size, result_bytes, cores[1])
            self._child = ChildProcess(
                "floor",
                [str(argument) for argument in arguments],
                None,
                module="benchmarks.dispatch.floor",
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

    def __exit__(self, *_: object) -> None:
        stop_all([self._child])
        self._mapping.close()

    def turn(self, request_bytes: int, result_bytes: int, seconds: float) -> Turn:
        """Make round trips to the floor's server for about `seconds`; the server sleeps afterwards.

        The first ones wake the server, check the copies by digest, and set the number of round trips.

        Returns:
            All round trips except the first ones.

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
            return Turn.of(self._call(request_bytes, result_bytes, rounds))
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


def main(pid: int, fd: int, size: int, result_bytes: int, core: int) -> None:
    """Answer the launcher's round trips until SIGTERM, pinned to a core.

    Args:
        pid, fd: Descriptor of the memory in the launcher.
        size: Of the memory.
        result_bytes: Size of the largest result.
        core: To run on.
    """
    bind_to_launcher()
    os.sched_setaffinity(0, {core})
    own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    mapping = _map_shared(own_fd, size)
    os.close(own_fd)
    source = bytearray(os.urandom(result_bytes))
    announce(ready="floor")
    _floor.serve(mapping, source)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:6]))
