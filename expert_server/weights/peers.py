"""The checkpoint of an expert server without --model: its peers send headers, and tensors when needed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import grpc
import xxhash

from eaas.checkpoint.header import ShardHeader
from eaas.checkpoint.shard import Shard
from eaas.checkpoint.source import CONFIG, INDEX
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
from expert_server.weights.remote_shard import RemoteShard

__all__ = ["PeerReader", "PeerSource", "peer_source", "serving_peers"]

_log = get_logger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_CALL_S = 10.0
# Limit of one stream. Received bytes are kept, and the next peer sends the missing ones.
_STREAM_S = 5.0
# Rounds over all peers without one new byte. With the pauses between them they last longer than gRPC waits
# before it retries an address that refused a connection.
_ROUNDS = 5
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

    def each(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Like `map`, in that pool."""
        return self._ahead.map(work, items)

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


class PeerSource:
    """The checkpoint that other expert servers have, as a `Source`.

    Args:
        reader: Reads their shards.
        described: What one of them says of the checkpoint.
    """

    is_remote = True

    def __init__(self, reader: PeerReader, described: pb.DescribeCheckpointResponse) -> None:
        self.digest = described.model_digest
        self._reader = reader
        self._texts = {CONFIG: described.config}
        if described.index:
            self._texts[INDEX] = described.index
        self._sizes = {shard.name: shard.bytes for shard in described.shards}

    def __str__(self) -> str:
        return "the other servers' checkpoint"

    def place(self, name: str) -> str:
        """Name a file in messages."""
        return f"{name} of {self}"

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is none of that name."""
        return len(self._texts[name]) if name in self._texts else self._sizes.get(name)

    def names(self) -> list[str]:
        """Sorted names of the files."""
        return sorted([*self._texts, *self._sizes])

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset of a file. Raises CorruptShardError."""
        text = self._texts.get(name)
        if text is not None:
            buffer[:] = text[offset : offset + len(buffer)]
            return
        try:
            self._reader.read(name, offset, buffer)
        except OSError as error:
            raise CorruptShardError(f"{self.place(name)} cannot be read: {error}") from error

    def each(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Like `map`, several at a time."""
        return self._reader.each(work, items)

    def open_shard(self, name: str, header: ShardHeader) -> Shard:
        """Return a shard with a known header."""
        return RemoteShard(name, self.place(name), header, self._reader, _RUN_BYTES)

    def others(self) -> Iterable[object]:
        """Iterate over the peers; until the next step, reads ask the current one first."""
        return self._reader.each_first()

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


def peer_source(reader: PeerReader, addresses: Sequence[str]) -> PeerSource:
    """Find the checkpoint that these peers serve.

    Raises:
        ClusterError: None of them has a checkpoint.
    """
    return PeerSource(reader, _describe(addresses, reader.tls))


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
