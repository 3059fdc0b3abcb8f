"""What weights come from: how fast that gives bytes when nothing else is done with them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import grpc

from eaas.grpc_client import channel, responses
from eaas.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["CHUNK_BYTES", "METHOD", "disk_rate", "evict", "loopback_rate"]

METHOD = "/eaas.bench.Loopback/Read"
CHUNK_BYTES = 2 << 20
"""Of one message, as expert servers send them to one another."""

_READ_BYTES = 16 << 20
_START_S = 60.0


def evict(directory: Path) -> None:
    """Has the shards of a checkpoint leave the page cache, so that they come from the disk again."""
    for file in _shards(directory):
        fd = os.open(file, os.O_RDONLY)
        try:
            # Only what has reached the disk can leave.
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def disk_rate(directory: Path, most_bytes: int) -> float:
    """Bytes/s at which shards that are not in the page cache are read, one after the other."""
    evict(directory)
    buffer = memoryview(bytearray(_READ_BYTES))
    done = 0
    started = time.monotonic()
    for file in _shards(directory):
        fd = os.open(file, os.O_RDONLY)
        try:
            while done < most_bytes and (count := os.readv(fd, [buffer])):
                done += count
        finally:
            os.close(fd)
    return done / (time.monotonic() - started)


def loopback_rate(most_bytes: int) -> float:
    """Bytes/s that another process sends over 127.0.0.1 as a gRPC stream, and nobody looks at.

    Raises:
        EaasError: That process did not start.
    """
    arguments = [str(max(1, most_bytes // CHUNK_BYTES))]
    child = ChildProcess("loopback", arguments, None, "eaas.bench.join.loopback_process")
    try:
        wait_ready([child], _START_S)
        with channel(child.address or "") as line:
            grpc.channel_ready_future(line).result(_START_S)
            started = time.monotonic()
            done = sum(len(chunk) for chunk in responses(line.unary_stream(METHOD)(b"")))
            return done / (time.monotonic() - started)
    finally:
        stop_all([child])


def _shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))
