"""A checkpoint that other servers have: its headers here, its tensors streamed when they are read."""

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
from eaas.checkpoint.files import CONFIG, INDEX
from eaas.checkpoint.pieces import Look, Pause, at_once, pieces, unseen
from eaas.checkpoint.shard import Shard, ShardHeader
from eaas.errors import ClusterError, CorruptShardError
from eaas.grpc_client import Backoff, channel, leave
from eaas.log import get_logger
from eaas.monitors import Monitors, ask_members
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.tls import Identity
from eaas.types import Member, MemberState, Role
from eaas.wire.chunk import Chunk, decode_chunk
from eaas.wire.frame import paste
from expert_server.background import step_back

__all__ = ["PeerReader", "checkpoint_of_peers", "runs", "serving_peers"]

_log = get_logger(__name__)

_CALL_S = 10.0
# Of one stream. What came in this time stays, and the next peer is asked for the rest.
_STREAM_S = 5.0
# Of all peers, without one new byte; with the pauses between them it is longer than gRPC waits before it
# tries an address again that refused it once.
_ROUNDS = 5
_LENGTH_BYTES = 8
# Of a shard, at first: nearly always all of its header.
_BEGIN_BYTES = 64 << 10
# Reads at a time.
_TOGETHER = 4
# Of neighbouring tensors that are read in one stream: below it, to ask takes longer than to read.
_RUN_BYTES = 4 << 20
_READ_SHARD = "/eaas.rpc.v1.ExpertService/ReadShard"


def serving_peers(monitor_address: str, tls: Identity | None = None) -> list[Member]:
    """The expert servers that serve now, as the monitor says.

    Args:
        monitor_address: host:port of the monitor; "host:port,host:port" where there are several.
        tls: Who asks; None: plain text.

    Raises:
        ClusterError: It does not answer.
    """
    with contextlib.closing(Monitors(monitor_address, tls)) as monitors:
        members = ask_members(monitors, _CALL_S)
    return [m for m in members if m.role is Role.EXPERT_SERVER and m.state is MemberState.SERVING]


class PeerReader:
    """Reads bytes of shards from whichever peer has them. Any thread may call it.

    Args:
        addresses: host:port of the peers now, the one to be asked first at the front.
        tls: Who asks; None: plain text.
    """

    def __init__(self, addresses: Callable[[], Sequence[str]], tls: Identity | None = None) -> None:
        self.tls = tls
        self._addresses = addresses
        self._lines_lock = threading.Lock()
        self._lines: dict[str, grpc.Channel] = {}
        # What is asked for one after the other is sent together: most tensors are small beside the time
        # that it takes to ask.
        self._ahead = ThreadPoolExecutor(_TOGETHER, "peers", step_back)
        # The one to be asked before the others; empty: none.
        self._first = ""

    def close(self) -> None:
        """Lets go of the peers, and ends what is being read."""
        self._ahead.shutdown(wait=False, cancel_futures=True)
        with self._lines_lock:
            lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()

    def start(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Calls it in one of a few threads that step back behind the experts."""
        return self._ahead.submit(work, *arguments)

    def each_first(self) -> Iterator[str]:
        """Goes through the peers: while one is at hand, it is asked before the others."""
        try:
            for address in self._addresses():
                self._first = address
                yield address
        finally:
            self._first = ""

    def read(self, shard: str, begin: int, buffer: memoryview) -> None:
        """Fills the buffer from a place of a shard. Goes on at another peer where one breaks off.

        Raises:
            ConnectionError: No peer has it, or none sends any more of it.
            CorruptShardError: The peers' bytes are wrong again and again, as where their files differ.
        """
        done, vain, wrong, why = 0, 0, 0, "there is no peer"
        digest = xxhash.xxh3_128()
        backoff = Backoff()
        while vain < _ROUNDS:
            if vain:
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
                            raise ValueError("its bytes do not have the digest that it states")
                except grpc.RpcError as error:
                    why = f"{address}: {error.details()}"
                except ValueError as error:
                    # Which of the bytes are wrong is not known.
                    why, done, digest = f"{address}: {error}", 0, xxhash.xxh3_128()
                    wrong += 1
                    if wrong == _ROUNDS:
                        raise CorruptShardError(
                            f"{shard}: peers send wrong bytes ({why})"
                        ) from error
                self._leave(address)
                _log.info("%s, byte %d: %s", shard, begin + done, why)
            vain = 0 if done > before else vain + 1
        raise ConnectionError(f"no peer sends it ({why})")

    def _stream(
        self, address: str, shard: str, begin: int, count: int, done: int
    ) -> Iterator[Chunk]:
        request = pb.ReadShardRequest(
            shard=shard, begin=begin, end=begin + count, resume_at=begin + done
        )
        with self._lines_lock:
            if address not in self._lines:
                self._lines[address] = channel(address, Role.EXPERT_SERVER.value, self.tls)
            line = self._lines[address]
        call = line.unary_stream(_READ_SHARD, pb.ReadShardRequest.SerializeToString)(
            request, timeout=_STREAM_S
        )
        try:
            for message in call:
                chunk = decode_chunk(message)
                at = chunk.offset - begin
                if at != done or at + len(chunk.data) > count:
                    raise ValueError(f"it sends byte {chunk.offset} out of turn")
                done += len(chunk.data)
                yield chunk
        finally:
            leave(call)

    def _leave(self, address: str) -> None:
        """The next read connects anew."""
        with self._lines_lock:
            line = self._lines.pop(address, None)
        if line is not None:
            line.close()


class _Run:
    """Bytes of a shard that are on their way, for several readers of parts of them."""

    def __init__(self, begin: int, data: bytearray, coming: Future[None]) -> None:
        self.begin = begin
        self.data = data
        self.coming = coming
        self.readers = 0


class _PeerShard(Shard):
    """A shard of which only the header is here. One thread at a time."""

    def __init__(self, path: Path, header: ShardHeader, reader: PeerReader) -> None:
        self.path = path
        self.header = header
        self._reader = reader
        # By place: what was asked for and is not read yet.
        self._coming: dict[tuple[int, int], _Run] = {}
        # Memory of runs that were read, by size: to touch new pages takes longer than to copy.
        self._free: dict[int, list[bytearray]] = {}

    def prefetch(self, places: Sequence[tuple[int, int]], pause: Pause = at_once) -> None:
        """Bytes that are read soon: they are asked for now, neighbours together."""
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
        """Fills the buffer from a place of the file, with a pause before each piece and a look at it.

        Raises OSError if it cannot.
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
    """Places in ascending order, (offset, count) each, parted where there is a gap or a part would be
    larger than `most_bytes`. Empty places are left out.
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
    """The checkpoint that these peers serve; its tensors stay with them until they are read.

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
        headers = {path: Shard(path).header for path in set(checkpoint.keys.values())}
    checkpoint.open_shard = lambda path, known: _PeerShard(path, headers[path], reader)
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
    """A file of the shard's size that has its header; the rest is a hole."""
    begin = bytearray(min(size, _BEGIN_BYTES))
    reader.read(path.name, 0, memoryview(begin))
    header_end = min(_LENGTH_BYTES + int.from_bytes(begin[:_LENGTH_BYTES], "little"), size)
    with path.open("wb") as file:
        file.truncate(size)
        file.write(begin)
        rest = bytearray(max(0, header_end - len(begin)))
        if rest:
            reader.read(path.name, len(begin), memoryview(rest))
            file.write(rest)
