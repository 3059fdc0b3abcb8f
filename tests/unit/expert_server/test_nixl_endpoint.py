"""The server's end of the nixl transport, over a real stream and a real agent."""

import mmap
import queue
import time
from collections.abc import Iterator

import grpc
import pytest

from eaas.errors import ConnectionLostError
from eaas.one_sided import Agent, nixl_version, why_not
from eaas.one_sided.slots import READY, SlotMemory, pack_note
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import RequestHeader, ResultHeader, SlotState
from eaas.wire.slot import REQUEST_HEADER_BYTES, Status
from endpoint_box import EndpointBox as Endpoint
from endpoint_box import header_of
from expert_server.transports import nixl_endpoint
from expert_server.transports.slot_ownership import Grant
from waiting import eventually

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there")
SLOT = 4096


class Peer:
    """A client's end, step by step: slot i is at i * SLOT in its memory, the result 2 KiB behind it."""

    def __init__(self, endpoint: Endpoint, grant: Grant, name: str = "") -> None:
        self.grant = grant
        self.agent: Agent[int] = Agent(name or grant.connection_id)
        self.memory = mmap.mmap(-1, 2 * SLOT)
        self.region = self.agent.register(self.memory, [(0, 2 * SLOT)])
        self.outbox: queue.SimpleQueue[pb.JoinRequest | None] = queue.SimpleQueue()
        self.stream = endpoint.stub.Join(iter(self.outbox.get, None), timeout=20)

    def shake(self, version: str = "", handle: bytes = b"") -> pb.JoinResponse:
        self.outbox.put(
            pb.JoinRequest(
                connection_id=self.grant.connection_id,
                nixl=version or nixl_version(),
                handle=handle or self.agent.handle(),
            )
        )
        return next(self.stream)

    def join(self, *, ready: bool = True) -> None:
        self.server = self.agent.learn(self.shake().handle)
        at = self.region.address
        memory = SlotMemory(at, at + SLOT // 2, SLOT).message(self.region)
        self.outbox.put(pb.JoinRequest(memory=memory))
        answer = next(self.stream).memory
        self.agent.learn(answer.description)
        self.theirs = SlotMemory.read(answer)
        if ready:
            self.agent.note(self.server, READY)
            assert self.next_note() == READY

    def next_note(self) -> bytes:
        notes: list[bytes] = []
        eventually(lambda: notes.extend(note for _, note in self.agent.notes()) or notes)
        (note,) = notes
        return note

    def ask(self, slot: int, tokens: int = 1, length: int | None = None) -> None:
        header = header_of(self.grant.generation, tokens)
        header.pack_into(self.memory, slot * SLOT)
        length = header.end if length is None else length
        self.agent.write(
            self.server,
            self.region.address + slot * SLOT,
            self.theirs.request(slot),
            max(length, 128),
            slot,
            pack_note(slot, length),
        )
        eventually(self.agent.written)

    def end(self) -> grpc.StatusCode:
        self.outbox.put(None)
        with pytest.raises(grpc.RpcError) as error:
            list(self.stream)
        self.agent.close()
        return error.value.code()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(nixl_endpoint, "GRACE_S", 0.5)
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


def test_a_write_beyond_the_granted_memory_does_not_begin(endpoint: Endpoint) -> None:
    """The rest of the arena's slot may have no memory: the server would die of the write."""
    grant = endpoint.table.grant("client", 1, 2, [(192, 128)])
    assert grant is not None
    peer = Peer(endpoint, grant)
    peer.join()
    most = REQUEST_HEADER_BYTES + grant.payload_capacity
    with pytest.raises(ConnectionLostError):
        peer.ask(1, length=most + 1)
    peer.ask(1)
    eventually(lambda: endpoint.state(1) == SlotState.WRITTEN)
    leave(endpoint, grant)
    peer.end()


def leave(endpoint: Endpoint, grant: Grant) -> None:
    endpoint.stub.Disconnect(pb.DisconnectRequest(connection_id=grant.connection_id))


def test_an_unknown_connection(endpoint: Endpoint) -> None:
    grant = endpoint.grant()
    endpoint.table.revoke(grant.connection_id)
    peer = Peer(endpoint, grant)
    with pytest.raises(grpc.RpcError, match="connect first"):
        peer.shake()
    assert peer.end() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("wrong", ["name", "version", "handle"])
def test_a_handle_that_is_not_the_connections(endpoint: Endpoint, wrong: str) -> None:
    grant = endpoint.grant()
    peer = Peer(endpoint, grant, name="another" if wrong == "name" else "")
    version = "0.0.1" if wrong == "version" else ""
    with pytest.raises(grpc.RpcError, match=r"name|NIXL 0\.0\.1|handle"):
        peer.shake(version, b"nothing" if wrong == "handle" else b"")
    assert peer.end() == grpc.StatusCode.INVALID_ARGUMENT
    assert endpoint.table.get(grant.connection_id) is None


def test_a_request_and_its_result(endpoint: Endpoint) -> None:
    grant = endpoint.grant()
    peer = Peer(endpoint, grant)
    peer.join()
    peer.ask(1)
    eventually(lambda: endpoint.state(1) == SlotState.WRITTEN)
    written = RequestHeader.unpack_from(endpoint.arena.buffer, endpoint.arena.request_offset(1))
    assert (written.batch_size, written.generation) == (1, grant.generation)
    result = ResultHeader.of(
        Status.OK, generation=grant.generation, request_id=1, rows=1, hidden_size=8
    )
    result.pack_into(endpoint.arena.buffer, endpoint.arena.result_offset(1))
    endpoint.arena.server_done(1)
    assert peer.next_note() == pack_note(1, result.end)
    assert ResultHeader.unpack_from(peer.memory, SLOT + SLOT // 2) == result
    assert endpoint.state(1) == SlotState.FREE
    leave(endpoint, grant)
    assert peer.end() == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("wrong", ["occupied", "beyond", "short", "long", "none", "not ready"])
def test_a_wrong_note_ends_the_connection(endpoint: Endpoint, wrong: str) -> None:
    grant = endpoint.grant()
    peer = Peer(endpoint, grant)
    peer.join(ready=wrong != "not ready")
    if wrong in ("short", "long", "not ready"):
        peer.ask(0, length={"short": 129, "long": 600}.get(wrong))
    elif wrong == "occupied":
        peer.ask(0)
        peer.ask(0)
    else:
        peer.agent.note(peer.server, pack_note(2, 200) if wrong == "beyond" else b"none")
    # This side must make progress, too, or the notification may never leave.
    eventually(lambda: peer.agent.notes() or endpoint.table.get(grant.connection_id) is None)
    assert endpoint.state(0) == SlotState.OFFLINE
    assert peer.end() == grpc.StatusCode.FAILED_PRECONDITION


def test_a_revoked_connection_ends_its_stream(endpoint: Endpoint) -> None:
    peer = Peer(endpoint, endpoint.grant())
    peer.join()
    endpoint.table.revoke_all()
    assert peer.end() == grpc.StatusCode.FAILED_PRECONDITION


def test_slots_stay_reserved_after_an_unclean_end(endpoint: Endpoint) -> None:
    peer = Peer(endpoint, endpoint.grant(slots=4))
    peer.join()
    peer.stream.cancel()
    eventually(lambda: not endpoint.table.clients())
    ended = time.monotonic()
    eventually(lambda: endpoint.table.grant("other", 1, 4))
    assert time.monotonic() - ended > 0.3
    peer.end()


def test_slots_of_a_leaving_client_are_free_at_once(endpoint, monkeypatch) -> None:
    monkeypatch.setattr(nixl_endpoint, "GRACE_S", 1e6)
    grant = endpoint.grant(slots=4)
    peer = Peer(endpoint, grant)
    peer.join()
    leave(endpoint, grant)
    assert endpoint.table.grant("other", 1, 4) is not None
    peer.end()


@pytest.mark.parametrize("same_process", [True, False])
def test_the_same_process_gets_its_slots_again_and_another_waits(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, same_process: bool
) -> None:
    monkeypatch.setattr(nixl_endpoint, "GRACE_S", 1e6)
    peer = Peer(endpoint, endpoint.grant(slots=4))
    peer.join()
    peer.stream.cancel()
    eventually(lambda: not endpoint.table.clients())
    endpoint.service.endpoints["nixl"].supersede("client", 1 if same_process else 2)
    assert (endpoint.table.grant("client", 2, 4) is not None) == same_process
    peer.end()


def test_an_idle_connection_uses_no_core(endpoint: Endpoint) -> None:
    peer = Peer(endpoint, endpoint.grant())
    peer.join()
    time.sleep(0.2)
    started, used = time.monotonic(), time.process_time()
    time.sleep(1.0)
    assert time.process_time() - used < 0.15 * (time.monotonic() - started)
    peer.stream.cancel()
    peer.end()
