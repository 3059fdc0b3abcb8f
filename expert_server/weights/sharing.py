"""Shares an expert server's checkpoint with servers that have none: reads its files and streams them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import grpc
import xxhash

from eaas.checkpoint.source import INDEX, SINGLE
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire.chunk import encode_chunk
from expert_server.weights.background import step_back

__all__ = ["CheckpointSharer", "Pace"]

_CHUNK_BYTES = 2 << 20
# Concurrent reads.
_READERS = 4


class Pace:
    """Limits the bytes of all streams, or of a load, to a rate. Thread-safe.

    Args:
        bytes_per_s: The rate.
        clock: Monotonic seconds.
        sleep: Sleeps for some seconds.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, count: int) -> None:
        """Sleep until the rate allows this many more bytes, and count them; callers wait in turn."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._bytes_per_s
        if begin > now:
            self._sleep(begin - now)


class CheckpointSharer:
    """Serves the checkpoint calls of `expert.proto` to other expert servers. Thread-safe.

    Args:
        path: The checkpoint's local directory; None if this server has none.
        bytes_per_s: Limit of the sum of all streams.
        model_digest: Digest of the checkpoint's `ModelShape`.
        config: Its `Checkpoint.config_text`.
    """

    CALLS: ClassVar = ("DescribeCheckpoint",)

    def __init__(
        self,
        path: Path | None,
        bytes_per_s: float,
        model_digest: str = "",
        config: bytes = b"",
    ) -> None:
        self._path = path
        self._config = config
        self._model_digest = model_digest
        self._pace = Pace(bytes_per_s)
        # Low-priority threads that read one chunk ahead of the stream.
        self._readers = ThreadPoolExecutor(_READERS, "share", step_back)

    def DescribeCheckpoint(
        self, request: pb.DescribeCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.DescribeCheckpointResponse:
        """Return config, index and shards' names and sizes to a server that starts without a checkpoint.

        That server then reads the bytes that it needs by ReadShard.
        """
        path = self._directory(context)
        index = path / INDEX
        single = (path / SINGLE).is_file()
        return pb.DescribeCheckpointResponse(
            config=self._config,
            index=b"" if single else index.read_bytes(),
            shards=[
                pb.ShardFile(name=shard.name, bytes=shard.stat().st_size)
                for shard in ([path / SINGLE] if single else sorted(path.glob("*.safetensors")))
            ],
            model_digest=self._model_digest,
        )

    def ReadShard(
        self, request: pb.ReadShardRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Stream part of a shard to a peer that loads it, then a digest, as messages of `eaas.wire.chunk`."""
        path = self._directory(context) / request.shard
        # Accept plain file names only, so that no path leads out of the checkpoint.
        if os.path.basename(request.shard) != request.shard or path.suffix != ".safetensors":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.shard!r} is not a shard")
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if not request.begin <= request.resume_at <= request.end <= size:
                    context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        f"bytes {request.begin} to {request.end} of {size}, from {request.resume_at}",
                    )
                yield from self._read(file.fileno(), request, context)
        except OSError as error:
            context.abort(grpc.StatusCode.DATA_LOSS, f"{path.name}: {error.strerror}")

    def close(self) -> None:
        """Stop the threads that read the checkpoint for other servers, when this server ends."""
        self._readers.shutdown(wait=False)

    def _read(
        self, fd: int, request: pb.ReadShardRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        digest = xxhash.xxh3_128()

        def read(offset: int) -> tuple[int, bytes]:
            # The caller has the bytes before `resume_at`, so they only enter the digest.
            limit = request.resume_at if offset < request.resume_at else request.end
            data = os.pread(fd, min(_CHUNK_BYTES, limit - offset), offset)
            digest.update(data)
            return len(data), encode_chunk(offset, data)

        offset = request.begin
        coming = self._readers.submit(read, offset)
        try:
            while offset < request.end and context.is_active():
                (count, message), begin = coming.result(), offset
                if not count:
                    context.abort(
                        grpc.StatusCode.DATA_LOSS, f"{request.shard} ends at byte {offset}"
                    )
                offset += count
                coming = self._readers.submit(read, offset)
                if begin >= request.resume_at:
                    self._pace.take(count)
                    yield message
        finally:
            # Wait for the read before the file closes.
            coming.exception()
        yield encode_chunk(offset, digest=digest.digest())

    def _directory(self, context: grpc.ServicerContext) -> Path:
        if self._path is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this server has no checkpoint")
        assert self._path is not None  # abort raises
        return self._path
