"""A checkpoint that other servers have: its headers here, its tensors streamed when they are read."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.files import CONFIG, INDEX, sampled
from eaas.checkpoint.shard import Shard, ShardHeader
from eaas.errors import ClusterError, CorruptShardError
from eaas.grpc_client import Backoff, channel, responses
from eaas.log import get_logger
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc, monitor_pb2, monitor_pb2_grpc
from eaas.types import Member, MemberState, Role

__all__ = ["PeerReader", "checkpoint_of_peers", "serving_peers"]

_log = get_logger(__name__)

_CALL_S = 10.0
# Between two chunks; a slower peer is left for another one.
_CHUNK_S = 5.0
# Of all peers, without one new byte; with the pauses between them it is longer than gRPC waits before it
# tries an address again that refused it once.
_ROUNDS = 5
_LENGTH_BYTES = 8


def serving_peers(monitor_address: str) -> list[Member]:
    """The expert servers that serve now, as the monitor says.

    Raises:
        ClusterError: It does not answer.
    """
    with channel(monitor_address) as line:
        call = monitor_pb2_grpc.MonitorServiceStub(line).Watch(
            monitor_pb2.WatchRequest(), timeout=_CALL_S
        )
        try:
            snapshot = next(response.snapshot for response in call)
        except grpc.RpcError as error:
            raise ClusterError(
                f"the monitor at {monitor_address} does not answer: {error.details()}; "
                "check the address and that the monitor runs"
            ) from error
        finally:
            call.cancel()
    members = [Member.from_proto(message) for message in snapshot.members]
    return [m for m in members if m.role is Role.EXPERT_SERVER and m.state is MemberState.SERVING]


class PeerReader:
    """Reads bytes of shards from whichever peer has them. One thread at a time.

    Args:
        addresses: host:port of the peers now, the one to be asked first at the front.
    """

    def __init__(self, addresses: Callable[[], Sequence[str]]) -> None:
        self._addresses = addresses
        # To the peer that was read from last.
        self._line: tuple[str, grpc.Channel] | None = None

    def close(self) -> None:
        """Lets go of the peer; the next read connects anew."""
        if self._line is not None:
            self._line[1].close()
            self._line = None

    def read(self, shard: str, begin: int, buffer: memoryview) -> None:
        """Fills the buffer from a place of a shard. Goes on at another peer where one breaks off.

        Raises:
            ConnectionError: No peer has it, or none sends any more of it.
        """
        done, vain, why = 0, 0, "there is no peer"
        backoff = Backoff()
        while vain < _ROUNDS:
            if vain:
                time.sleep(backoff.next_s())
            before = done
            for address in self._addresses():
                try:
                    for response in self._stream(address, shard, begin, len(buffer), done):
                        buffer[done : done + len(response.data)] = response.data
                        done += len(response.data)
                        if response.digest:
                            if response.digest == hashlib.sha256(buffer).digest():
                                return
                            raise ValueError("its bytes do not have the digest that it states")
                except (grpc.RpcError, TimeoutError) as error:
                    what = error.details() if isinstance(error, grpc.Call) else error
                    why = f"{address}: {what}"
                except ValueError as error:
                    # Which of the bytes are wrong is not known.
                    why, done = f"{address}: {error}", 0
                self.close()
                _log.info("%s, byte %d: %s", shard, begin + done, why)
            vain = 0 if done > before else vain + 1
        raise ConnectionError(f"no peer sends it ({why})")

    def _stream(
        self, address: str, shard: str, begin: int, count: int, done: int
    ) -> Iterator[pb.ReadShardResponse]:
        request = pb.ReadShardRequest(
            shard=shard, begin=begin, end=begin + count, resume_at=begin + done
        )
        if self._line is None or self._line[0] != address:
            self.close()
            self._line = (address, channel(address))
        call = expert_pb2_grpc.ExpertServiceStub(self._line[1]).ReadShard(request)
        try:
            for response in responses(call, _CHUNK_S):
                at = response.offset - begin
                if at != done or at + len(response.data) > count:
                    raise ValueError(f"it sends byte {response.offset} out of turn")
                done += len(response.data)
                yield response
        finally:
            call.cancel()


class _PeerShard(Shard):
    """A shard of which only the header is here."""

    def __init__(self, path: Path, header: ShardHeader, reader: PeerReader) -> None:
        self.path = path
        self.header = header
        self._reader = reader

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills the buffer from a place of the file. Raises OSError if it cannot."""
        if len(buffer):
            self._reader.read(self.path.name, offset, buffer)


def checkpoint_of_peers(reader: PeerReader, addresses: Sequence[str]) -> Checkpoint:
    """The checkpoint that these peers serve; its tensors stay with them until they are read.

    Raises:
        ClusterError: None of them has a checkpoint.
        CheckpointError: It cannot be served, or not be read (see its subclasses).
    """
    described = _describe(addresses)
    with tempfile.TemporaryDirectory(prefix="eaas-checkpoint-") as name:
        directory = Path(name)
        (directory / CONFIG).write_bytes(described.config)
        if described.index:
            (directory / INDEX).write_bytes(described.index)
        for file in described.shards:
            try:
                _write_header(directory / Path(file.name).name, file.bytes, reader)
            except OSError as error:
                raise CorruptShardError(
                    f"{file.name}: its header cannot be read: {error}"
                ) from error
        checkpoint = Checkpoint.open(directory)
        headers = {path: Shard(path).header for path in set(checkpoint.keys.values())}
    checkpoint.open_shard = lambda path, known: _PeerShard(path, headers[path], reader)
    return checkpoint


def _describe(addresses: Sequence[str]) -> pb.DescribeCheckpointResponse:
    why = "none serves"
    for address in addresses:
        with channel(address) as line:
            try:
                described: pb.DescribeCheckpointResponse = expert_pb2_grpc.ExpertServiceStub(
                    line
                ).DescribeCheckpoint(pb.DescribeCheckpointRequest(), timeout=_CALL_S)
                return described
            except grpc.RpcError as error:
                why = f"{address}: {error.details()}"
    raise ClusterError(f"no server of the cluster has a checkpoint to share ({why}): give --model")


def _write_header(path: Path, size: int, reader: PeerReader) -> None:
    """A file of the shard's size that has its header, and what the checkpoint's digest looks at; the
    rest are holes.
    """
    length = bytearray(_LENGTH_BYTES)
    reader.read(path.name, 0, memoryview(length))
    header_bytes = min(int.from_bytes(length, "little"), size - _LENGTH_BYTES)
    with path.open("wb") as file:
        file.truncate(size)
        for begin, end in [(0, _LENGTH_BYTES + header_bytes), *sampled(size)]:
            data = bytearray(end - begin)
            reader.read(path.name, begin, memoryview(data))
            file.seek(begin)
            file.write(data)
