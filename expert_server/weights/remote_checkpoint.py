"""A checkpoint of an expert server without --model: it reads headers from its peers, tensors when needed."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import xxhash

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.files import CONFIG, INDEX, ShardHeader
from eaas.checkpoint.pieces import Look, Pause, at_once, pieces, unseen
from eaas.checkpoint.shard import Shard
from eaas.errors import ClusterError, CorruptShardError
from eaas.log import get_logger
from eaas.membership.monitors import Monitors, ask_members
from eaas.net.grpc_client import Backoff, channel, leave
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import Member, MemberState, Role
from eaas.wire.chunk import Chunk, decode_chunk
from eaas.wire.frame import paste
from expert_server.weights.background import step_back

__all__ = ["PeerReader", "checkpoint_of_peers", "runs", "serving_peers"]

_log = get_logger(__name__)

_CALL_S = 10.0
# Limit of one stream. Received bytes are kept, and the next peer sends the missing ones.
_STREAM_S = 5.0
# Rounds over all peers without one new byte. With the pauses between them they last longer than gRPC waits
# before it retries an address that refused a connection.
_ROUNDS = 5
_LENGTH_BYTES = 8
# First read of a shard: nearly always covers its header.
_HEADER_GUESS_BYTES = 64 << 10
# Concurrent reads.
_READERS = 4
# Limit for neighbouring tensors in one stream: below it, a request takes longer than the bytes.
_RUN_BYTES = 4 << 20
_READ_SHARD = "/eaas.rpc.v1.ExpertService/ReadShard"


def serving_peers(monitor_address: str, tls: Identity | None = None) -> list[Member]:
    """Ask the monitor for the SERVING expert servers, whose checkpoint a server without one reads.

    Args:
        monitor_address: host:port of the monitor; "host:port,host:port" for several.
        tls: This process's certificate; None: plain text.

    Raises:
        ClusterError: No monitor answers.
    """
    with contextlib.closing(Monitors(monitor_address, tls)) as monitors:
        members = ask_members(monitors, _CALL_S)
    return [m for m in members if m.role is Role.EXPERT_SERVER and m.state is MemberState.SERVING]


class PeerReader:
    """Reads bytes of shards from any other expert server that has them. Thread-safe.

    Args:
        addresses: Returns host:port of the present peers, in the order to ask them.
        tls: This process's certificate; None: plain text.
    """

    def __init__(self, addresses: Callable[[], Sequence[str]], tls: Identity | None = None) -> None:
        self.tls = tls
        self._addresses = addresses
        self._channels_lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        # Reads run concurrently: for most tensors, the request takes longer than the bytes.
        self._ahead = ThreadPoolExecutor(_READERS, "peers", step_back)
        # The peer to ask before the others; empty: none.
        self._first = ""

    def close(self) -> None:
        """Close the channels to the peers and cancel the reads, when this server ends."""
        self._ahead.shutdown(wait=False, cancel_futures=True)
        with self._channels_lock:
            channels, self._channels = self._channels, {}
        for line in channels.values():
            line.close()

    def start(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Run a function, such as `read`, in the pool of low-priority threads, so that reads overlap."""
        return self._ahead.submit(work, *arguments)

    def each_first(self) -> Iterator[str]:
        """Iterate over the peers, to read wrong bytes again; until the next step, reads ask it first."""
        try:
            for address in self._addresses():
                self._first = address
                yield address
        finally:
            self._first = ""

    def read(self, shard: str, begin: int, buffer: memoryview) -> None:
        """Fill the buffer from a position in a shard on a peer. If its stream ends early, ask another one.

        Raises:
            ConnectionError: No peer has the shard, or none sends more of it.
            CorruptShardError: The peers' bytes are wrong repeatedly, for example because their files differ.
        """
        done, idle_rounds, wrong, why = 0, 0, 0, "there is no peer"
        digest = xxhash.xxh3_128()
        backoff = Backoff()
        while idle_rounds < _ROUNDS:
            if idle_rounds:
                time.sleep(backoff.next_s())
            before = done
            for address in sorted(self._addresses(), key=lambda peer: peer != self._first):
                try:
                    for chunk in self._stream(address, shard, begin, len(buffer), done):
                        paste(buffer, done, chunk.data)
                        done += len(chunk.data)
                        digest.update(chunk.data)
                        if chunk.digest:
                            if chunk.digest == digest.digest():
                                return
                            raise ValueError("the bytes do not match their digest")
                except grpc.RpcError as error:
                    why = f"{address}: {error.details()}"
                except ValueError as error:
                    # Any of the bytes may be wrong.
                    why, done, digest = f"{address}: {error}", 0, xxhash.xxh3_128()
                    wrong += 1
                    if wrong == _ROUNDS:
                        raise CorruptShardError(
                            f"{shard}: peers send wrong bytes ({why})"
                        ) from error
                self._disconnect(address)
                _log.info("%s, byte %d: %s", shard, begin + done, why)
            idle_rounds = 0 if done > before else idle_rounds + 1
        raise ConnectionError(f"no peer sends the shard ({why})")

    def _stream(
        self, address: str, shard: str, begin: int, count: int, done: int
    ) -> Iterator[Chunk]:
        request = pb.ReadShardRequest(
            shard=shard, begin=begin, end=begin + count, resume_at=begin + done
        )
        with self._channels_lock:
            if address not in self._channels:
                self._channels[address] = channel(address, Role.EXPERT_SERVER.value, self.tls)
            line = self._channels[address]
        call = line.unary_stream(_READ_SHARD, pb.ReadShardRequest.SerializeToString)(
            request, timeout=_STREAM_S
        )
        try:
            for message in call:
                chunk = decode_chunk(message)
                at = chunk.offset - begin
                if at != done or at + len(chunk.data) > count:
                    raise ValueError(f"unexpected byte {chunk.offset}")
                done += len(chunk.data)
                yield chunk
        finally:
            leave(call)

    def _disconnect(self, address: str) -> None:
        """Close a peer's channel after a failed read; the next read connects again."""
        with self._channels_lock:
            line = self._channels.pop(address, None)
        if line is not None:
            line.close()


class _Run:
    """A read of adjacent tensors in progress, shared by the readers of its parts."""

    def __init__(self, begin: int, data: bytearray, coming: Future[None]) -> None:
        self.begin = begin
        self.data = data
        self.coming = coming
        self.readers = 0


class _PeerShard(Shard):
    """A shard on other servers, with its header in memory here. One thread at a time."""

    def __init__(self, path: Path, header: ShardHeader, reader: PeerReader) -> None:
        self.path = path
        self.header = header
        self._reader = reader
        # Places requested and not read yet.
        self._coming: dict[tuple[int, int], _Run] = {}
        # Memory of finished runs, by size: touching new pages takes longer than copying.
        self._free: dict[int, list[bytearray]] = {}

    def prefetch(self, places: Sequence[tuple[int, int]], pause: Pause = at_once) -> None:
        """Request these places of the shard from peers ahead of `read_into`, adjacent ones together."""
        for neighbours in runs(places, _RUN_BYTES):
            pause()
            begin, (last, count) = neighbours[0][0], neighbours[-1]
            size = last + count - begin
            free = self._free.get(size)
            data = free.pop() if free else bytearray(size)
            read = self._reader.start(self._reader.read, self.path.name, begin, memoryview(data))
            run = _Run(begin, data, read)
            for place in neighbours:
                self._coming[place] = run
                run.readers += 1

    def read_into(
        self, buffer: memoryview, offset: int, pause: Pause = at_once, look: Look = unseen
    ) -> None:
        """Fill the buffer from a position in the file; call `pause` before each piece and `look` on it after.

        Raises OSError on failure.
        """
        run = self._coming.pop((offset, len(buffer)), None)
        if run is None:
            if len(buffer):
                pause()
                self._reader.read(self.path.name, offset, buffer)
                look(buffer)
            return
        run.coming.result()
        data = memoryview(run.data)[offset - run.begin :]
        for begin, end in pieces(len(buffer)):
            pause()
            paste(buffer, begin, data[begin:end])
            look(buffer[begin:end])
        run.readers -= 1
        if not run.readers:
            self._free.setdefault(len(run.data), []).append(run.data)


def runs(places: Sequence[tuple[int, int]], most_bytes: int) -> Iterator[Sequence[tuple[int, int]]]:
    """Group adjacent places, (offset, count) each in ascending order, into runs of at most `most_bytes`.

    Empty places are left out.
    """
    run: list[tuple[int, int]] = []
    for offset, count in places:
        if not count:
            continue
        if run and (offset != sum(run[-1]) or offset + count - run[0][0] > most_bytes):
            yield run
            run = []
        run.append((offset, count))
    if run:
        yield run


def checkpoint_of_peers(reader: PeerReader, addresses: Sequence[str]) -> Checkpoint:
    """Open the checkpoint that these peers serve; its tensors stay with them until they are read.

    Raises:
        ClusterError: None of them has a checkpoint.
        CheckpointError: It cannot be served, or not be read (see its subclasses).
    """
    described = _describe(addresses, reader.tls)
    with tempfile.TemporaryDirectory(prefix="eaas-checkpoint-") as name:
        directory = Path(name)
        (directory / CONFIG).write_bytes(described.config)
        if described.index:
            (directory / INDEX).write_bytes(described.index)
        coming = [
            (f.name, reader.start(_write_header, directory / Path(f.name).name, f.bytes, reader))
            for f in described.shards
        ]
        for shard, written in coming:
            try:
                written.result()
            except OSError as error:
                raise CorruptShardError(f"{shard}: its header cannot be read: {error}") from error
        checkpoint = Checkpoint.open(directory, described.model_digest)
    checkpoint.open_shard = lambda path, header: _PeerShard(path, header, reader)
    checkpoint.elsewhere = reader.each_first
    return checkpoint


def _describe(addresses: Sequence[str], tls: Identity | None) -> pb.DescribeCheckpointResponse:
    why = "none serves"
    for address in addresses:
        with channel(address, Role.EXPERT_SERVER.value, tls) as line:
            try:
                described: pb.DescribeCheckpointResponse = expert_pb2_grpc.ExpertServiceStub(
                    line
                ).DescribeCheckpoint(pb.DescribeCheckpointRequest(), timeout=_CALL_S)
                return described
            except grpc.RpcError as error:
                why = f"{address}: {error.details()}"
    raise ClusterError(f"no server of the cluster has a checkpoint to share ({why}): give --model")


def _write_header(path: Path, size: int, reader: PeerReader) -> None:
    """Write a sparse file of the shard's size that holds only its header, read from a peer."""
    begin = bytearray(min(size, _HEADER_GUESS_BYTES))
    reader.read(path.name, 0, memoryview(begin))
    header_end = min(_LENGTH_BYTES + int.from_bytes(begin[:_LENGTH_BYTES], "little"), size)
    with path.open("wb") as file:
        file.truncate(size)
        file.write(begin)
        rest = bytearray(max(0, header_end - len(begin)))
        if rest:
            reader.read(path.name, len(begin), memoryview(rest))
            file.write(rest)
