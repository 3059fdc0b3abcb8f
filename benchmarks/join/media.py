"""Measures the raw speed of the media that weights come from: disk and loopback."""

from __future__ import annotations

import os
import time
from pathlib import Path

import grpc

from eaas.net.grpc_client import channel
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["CHUNK_BYTES", "METHOD", "disk_rate", "evict", "loopback_rate"]

METHOD = "/eaas.bench.Loopback/Read"
CHUNK_BYTES = 2 << 20
"""Bytes of a message in the loopback stream, as between expert servers."""

_READ_BYTES = 16 << 20
_START_S = 60.0
_READ_S = 600.0


def evict(directory: Path) -> None:
    """Evict a checkpoint's shards from the page cache."""
    for file in _shards(directory):
        fd = os.open(file, os.O_RDONLY)
        try:
            # Write dirty pages to disk, because they cannot be evicted.
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def disk_rate(directory: Path, most_bytes: int) -> float:
    """Measure the bytes/s of reading a checkpoint's shards from disk."""
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
    """Measure the bytes/s of a gRPC stream from another process over 127.0.0.1. Raises EaasError."""
    arguments = [str(max(1, most_bytes // CHUNK_BYTES))]
    child = ChildProcess("loopback", arguments, None, "benchmarks.join.loopback_process")
    try:
        wait_ready([child], _START_S)
        with channel(child.address or "") as stub:
            grpc.channel_ready_future(stub).result(_START_S)
            started = time.monotonic()
            done = sum(map(len, stub.unary_stream(METHOD)(b"", timeout=_READ_S)))
            return done / (time.monotonic() - started)
    finally:
        stop_all([child])


def _shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))
