"""A checkpoint read from peers that break off, send wrong bytes, or have none."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.files import read_files
from eaas.errors import ClusterError, CorruptShardError
from eaas.net.grpc_client import channel
from eaas.net.grpc_server import Service, serve
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc, monitor_pb2, monitor_pb2_grpc
from eaas.types import Member, MemberState, Role
from expert_server.weights.peers import PeerReader, peer_source, serving_peers
from expert_server.weights.reader import ExpertReader
from expert_server.weights.remote_shard import runs
from expert_server.weights.sharing import CheckpointSharer, Pace

FAST = 1e12
SHARD = "model.safetensors"
Start = Callable[..., Any]
Paths = Callable[..., Path]


class Peer:
    """The two calls of a peer under the test's control."""

    def __init__(self, path: Path | None) -> None:
        is_whole = path is not None and (path / "config.json").exists()
        opened = Checkpoint.open(path) if path is not None and is_whole else None
        self.sharer = CheckpointSharer(
            path,
            FAST,
            opened.shape.digest if opened else "",
            opened.config_text if opened else b"",
        )
        self.asked: list[tuple[int, int, int]] = []
        self.spoil: Callable[[Iterator[Any]], Iterator[Any]] = iter

    def DescribeCheckpoint(self, request: Any, context: Any) -> Any:
        return self.sharer.DescribeCheckpoint(request, context)

    def ReadShard(self, request: Any, context: Any) -> Iterator[Any]:
        self.asked.append((request.begin, request.end, request.resume_at))
        sent = self.sharer.ReadShard(request, context)
        return self.spoil(pb.ReadShardResponse.FromString(message) for message in sent)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(path: Path | None) -> tuple[Peer, str]:
            peer = Peer(path)
            add = expert_pb2_grpc.add_ExpertServiceServicer_to_server
            server = serve([Service("eaas.rpc.v1.ExpertService", add, peer)], "127.0.0.1", 0)
            stack.callback(server.stop, 0)
            return peer, server.address

        yield begin


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / SHARD).write_bytes(bytes(range(256)) * (3 << 12))
    return tmp_path


def read(addresses: list[str], begin: int, count: int) -> bytes:
    buffer = bytearray(count)
    reader = PeerReader(lambda: addresses)
    try:
        reader.read(SHARD, begin, memoryview(buffer))
    finally:
        reader.close()
    return bytes(buffer)


def test_read_any_range(files: Path, start: Start) -> None:
    _, address = start(files)
    whole = (files / SHARD).read_bytes()
    for begin, count in ((0, 1), (5, 3), (17, 2_500_000), (len(whole) - 1, 1), (0, len(whole))):
        assert read([address], begin, count) == whole[begin : begin + count]


def test_a_broken_stream_continues_at_another_peer(files: Path, start: Start) -> None:
    first, one = start(files)
    second, two = start(files)

    def break_off(responses: Iterator[Any]) -> Iterator[Any]:
        yield next(responses)
        raise RuntimeError("the disk is gone")

    first.spoil = break_off
    whole = (files / SHARD).read_bytes()
    assert read([one, two], 7, 2_500_000) == whole[7 : 7 + 2_500_000]
    assert first.asked == [(7, 2_500_007, 7)]
    assert second.asked == [(7, 2_500_007, 7 + (2 << 20))]


def flip(responses: Iterator[Any]) -> Iterator[Any]:
    for response in responses:
        response.data = bytes(response.data).replace(b"\x07", b"\x06")
        yield response


def shift(responses: Iterator[Any]) -> Iterator[Any]:
    for response in responses:
        response.offset += 1
        yield response


@pytest.mark.parametrize(
    ("spoil", "told"), [(flip, "do not match their digest"), (shift, "unexpected byte")]
)
def test_wrong_bytes_or_chunks_out_of_turn_are_read_again_from_another_peer(
    files: Path, start: Start, spoil: Any, told: str
) -> None:
    first, one = start(files)
    second, two = start(files)
    first.spoil = spoil
    assert read([one, two], 0, 3000) == (files / SHARD).read_bytes()[:3000]
    assert second.asked == [(0, 3000, 0)]
    with pytest.raises(CorruptShardError, match=told):
        read([one], 0, 3000)


def test_peers_with_different_files_are_an_error(tmp_path: Path, start: Start) -> None:
    """Each peer sends a part before it breaks off, so every attempt makes progress."""
    addresses = []
    for chunks in (1, 2):
        directory = tmp_path / str(chunks)
        directory.mkdir()
        (directory / SHARD).write_bytes(bytes([chunks]) * (4 << 20))
        peer, address = start(directory)

        def break_off(responses: Iterator[Any], chunks: int = chunks) -> Iterator[Any]:
            yield from itertools.islice(responses, chunks)
            raise RuntimeError("the disk is gone")

        peer.spoil = break_off
        addresses.append(address)
    with pytest.raises(CorruptShardError, match="peers send wrong bytes"):
        read(addresses, 0, 4 << 20)


def test_peers_without_a_checkpoint_are_skipped(files: Path, start: Start) -> None:
    _, without = start(None)
    _, address = start(files)
    assert read([without, address], 0, 10) == bytes(range(10))
    with pytest.raises(ConnectionError, match="this server has no checkpoint"):
        read([without], 0, 10)
    with pytest.raises(ConnectionError, match="there is no peer"):
        read([], 0, 10)
    with pytest.raises(ClusterError, match=r"has a checkpoint to share .*: give --model"):
        peer_source(PeerReader(lambda: [without]), [without])


@pytest.mark.parametrize(
    ("shard", "begin", "end", "resume_at", "code"),
    [
        ("../model.safetensors", 0, 1, 0, "INVALID_ARGUMENT"),
        ("/etc/passwd", 0, 1, 0, "INVALID_ARGUMENT"),
        ("config.json", 0, 1, 0, "INVALID_ARGUMENT"),
        (SHARD, 0, 1 << 40, 0, "INVALID_ARGUMENT"),
        (SHARD, 5, 4, 4, "INVALID_ARGUMENT"),
        (SHARD, 5, 9, 4, "INVALID_ARGUMENT"),
        (SHARD, 5, 9, 10, "INVALID_ARGUMENT"),
        ("other.safetensors", 0, 1, 0, "DATA_LOSS"),
    ],
)
def test_only_the_checkpoints_shards_can_be_read(
    files: Path, start: Start, shard: str, begin: int, end: int, resume_at: int, code: str
) -> None:
    _, address = start(files)
    request = pb.ReadShardRequest(shard=shard, begin=begin, end=end, resume_at=resume_at)
    with channel(address) as line, pytest.raises(grpc.RpcError) as refusal:
        list(expert_pb2_grpc.ExpertServiceStub(line).ReadShard(request, timeout=10))
    assert refusal.value.code().name == code


def test_a_resumed_stream_has_the_digest_of_the_whole(files: Path, start: Start) -> None:
    _, address = start(files)
    request = pb.ReadShardRequest(shard=SHARD, begin=1, end=9, resume_at=6)
    with channel(address) as line:
        *parts, last = expert_pb2_grpc.ExpertServiceStub(line).ReadShard(request, timeout=10)
    assert [(p.offset, p.data) for p in parts] == [(6, bytes((6, 7, 8)))]
    assert last.digest == xxhash.xxh3_128(bytes(range(1, 9))).digest()


def test_the_rate_limits_the_sum_of_all_streams() -> None:
    slept: list[float] = []
    now = [0.0]
    pace = Pace(1000.0, lambda: now[0], slept.append)
    pace.take(500)
    pace.take(500)
    pace.take(1000)
    assert slept == [0.5, 1.0]
    # Unused time gives no credit.
    now[0] = 60.0
    pace.take(10)
    pace.take(10)
    assert slept[2:] == [pytest.approx(0.01)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30),
    st.integers(1, 20),
)
def test_adjacent_places_form_runs(steps: list[tuple[int, int]], most_bytes: int) -> None:
    """Steps: the gap before a place, and its size."""
    places, end = [], 0
    for gap, count in steps:
        places.append((end + gap, count))
        end += gap + count
    found = list(runs(places, most_bytes))
    assert [place for run in found for place in run] == [p for p in places if p[1]]
    for run in found:
        size = sum(count for _, count in run)
        assert run[0][0] + size == sum(run[-1])
        assert size <= most_bytes or len(run) == 1
    for run, following in itertools.pairwise(found):
        together = sum(following[0]) - run[0][0]
        assert following[0][0] > sum(run[-1]) or together > most_bytes


def test_adjacent_tensors_are_read_in_one_stream_and_two_streams_at_once(checkpoint, start) -> None:
    path = checkpoint("qwen3_moe")
    peer, address = start(path)
    reader = PeerReader(lambda: [address])
    weights = ExpertReader(Checkpoint.open(peer_source(reader, [address])))
    asked = len(peer.asked)
    assert len(list(weights.read(0, range(8)))) == 8
    # Gate, up and down of eight experts are 24 tensors.
    assert len(peer.asked) - asked < 8
    # Else the first would wait for ever; `test_url_source.py` reads experts so.
    both = threading.Barrier(2, timeout=20)
    for read_ahead in [reader.start(both.wait) for _ in range(2)]:
        read_ahead.result()
    reader.close()


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_a_checkpoint_of_peers_equals_the_local_one(arch, checkpoint, start) -> None:
    """Also if one tensor holds all experts, and if conversion rules apply."""
    path = checkpoint(arch)
    peer, address = start(path)
    here = Checkpoint.open(path)
    reader = PeerReader(lambda: [address])
    there = Checkpoint.open(peer_source(reader, [address]))
    assert there.shape == here.shape
    asked = len(peer.asked)
    theirs, ours = ExpertReader(there), ExpertReader(here)
    for layer in range(here.shape.num_layers):
        pairs = zip(theirs.read(layer, [1, 5]), ours.read(layer, [1, 5]), strict=True)
        for (expert, got), (_, wanted) in pairs:
            assert expert in (1, 5)
            assert torch.equal(got.up, wanted.up)
            assert torch.equal(got.down, wanted.down)
            assert got.digest == wanted.digest
    assert len(peer.asked) > asked
    # Two experts of eight, and no byte more; before them the headers.
    moved = sum(end - begin for begin, end, _ in peer.asked[asked:])
    assert moved == sum(2 * ours.expert_bytes(layer) for layer in range(here.shape.num_layers))
    opened = sum(end - begin for begin, end, _ in peer.asked[:asked])
    assert opened == sum(header.nbytes for header in read_files(path).headers.values())
    reader.close()


class Monitor:
    """Reports the serving members to any watcher."""

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        states = {"s1": MemberState.SERVING, "s2": MemberState.JOINING}
        members = [Member(i, Role.EXPERT_SERVER, 1, "h", i, s) for i, s in states.items()]
        messages = [m.to_proto() for m in members]
        yield monitor_pb2.WatchResponse(snapshot=monitor_pb2.Snapshot(members=messages))

    def _unused(self, request: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this test")

    Register = Heartbeat = Deregister = ReportOutcome = KeepRecord = GetRecord = _unused


def test_peers_from_any_of_several_monitors() -> None:
    add = monitor_pb2_grpc.add_MonitorServiceServicer_to_server
    monitor = serve([Service("eaas.rpc.v1.MonitorService", add, Monitor())], "127.0.0.1", 0)
    try:
        # No monitor listens at the first address.
        found = serving_peers(f"127.0.0.1:1, {monitor.address}")
    finally:
        monitor.stop(0)
    assert [peer.id for peer in found] == ["s1"]
