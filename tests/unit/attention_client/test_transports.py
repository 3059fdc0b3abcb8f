"""One conformance suite for all transports.

Run as a script, this file is the server, or the client, that some tests kill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from attention_client.connection import Connection
from attention_client.dispatch.parts import Part
from attention_client.messages import WIRE_DTYPES, LayerInput, Ticket
from attention_client.metrics import ClientMetrics
from attention_client.transports import opener
from eaas.errors import ConfigError, ConnectionLostError, SlotsBusyError, WrongRequestError
from eaas.grpc_client import channel as open_channel
from eaas.grpc_server import Service, serve
from eaas.one_sided import why_not
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import ModelShape
from eaas.wire import Arena, ResultHeader, SlotState
from eaas.wire.header import VERSION, WireDtype, payload_layout, result_length
from eaas.wire.slot import Status
from expert_server import nixl_endpoint
from expert_server.loop import ServeLoop
from expert_server.service import SERVICE, ExpertService, add_expert_service, transports
from expert_server.slots import SlotTable

HIDDEN, TOP_K, EXPERTS, SLOT_TOKENS, SLOTS = 8, 2, 4, 16, 64
SHAPE = ModelShape("tiny", EXPERTS, HIDDEN, TOP_K, ("layer.0", "layer.1"), "float32", "digest")
LARGE = 65_536
PATIENCE_S = 20.0


def kernel(
    x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, layer: int
) -> torch.Tensor:
    """Each expert multiplies by its number and the layer's."""
    if (ids_TK >= EXPERTS).any():
        raise LookupError(f"layer {layer}: not here")
    factor_TK = scores_TK * (ids_TK + 1) * (ids_TK >= 0) * (layer + 1)
    return x_TH.float() * factor_TK.sum(1, keepdim=True)


class Server:
    """An expert server without a model, a monitor or a main; without `run` the test is the loop."""

    def __init__(self, *, run: bool = True, slots: int = SLOTS, tokens: int = SLOT_TOKENS) -> None:
        payload = payload_layout(tokens, HIDDEN, TOP_K, WireDtype.FLOAT32).total
        self.arena = Arena.create_shared(
            slots, payload, result_length(tokens, HIDDEN), time.monotonic_ns()
        )
        self.table = SlotTable(self.arena)
        self.loop = ServeLoop(self.arena, self.table, kernel, SHAPE, 20)
        self.service = ExpertService(self.arena, self.table, None, SHAPE, lambda epoch: None)
        self.server = serve(
            [Service(SERVICE, add_expert_service, self.service)], "127.0.0.1", 0, SLOTS + 32
        )
        self.address = self.server.address
        self.thread = threading.Thread(target=self.loop.run, name="loop")
        if run:
            self.thread.start()

    def written(self) -> list[int]:
        return self.arena.flags.scan(0, self.arena.slots, SlotState.WRITTEN.mask)

    def close(self) -> None:
        self.loop.stop()
        if self.thread.ident:
            self.thread.join()
        self.table.revoke_all()
        self.service.close()
        self.server.stop(0)
        eventually(lambda: not threads("exchange"))
        self.arena.close()


class Client:
    """Connects, and keeps what it connected to close it."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.metrics = ClientMetrics(CollectorRegistry())
        self.connections: list[Connection] = []
        self.lost: list[Connection] = []

    def connect(self, address: str, client_id: str = "client", slots: int = 4) -> Connection:
        return self.open(*self.grant(address, client_id, slots))

    def grant(
        self, address: str, client_id: str = "client", slots: int = 4
    ) -> tuple[pb.ConnectResponse, grpc.Channel]:
        channel = open_channel(address)
        request = pb.ConnectRequest(
            client_id=client_id,
            client_incarnation=1,
            protocol_version=VERSION,
            transport=self.transport,
            slots=slots,
            hidden_size=HIDDEN,
            model_digest=SHAPE.digest,
        )
        return expert_pb2_grpc.ExpertServiceStub(channel).Connect(request, timeout=10), channel

    def open(self, granted: pb.ConnectResponse, channel: grpc.Channel) -> Connection:
        early: list[str] = []
        box: list[Connection] = []

        def gone(reason: str) -> None:
            early.append(reason)
            if box:
                box[0].lose(reason)

        try:
            link = opener(self.transport)(granted, channel, gone)
        except ConnectionLostError:
            channel.close()
            raise
        connection = Connection(
            "server", 1, link, HIDDEN, 20, False, self.lost.append, channel.close, self.metrics
        )
        box.append(connection)
        if early:
            connection.lose(early[0])
        self.connections.append(connection)
        return connection

    def late_answers(self) -> float:
        return float(self.metrics.late_answers._value.get())


def eventually(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def threads(*names: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in names]


def segments_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/")


NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(why_not()), reason=why_not()))


@pytest.fixture(params=["shm", "grpc", NIXL])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    torch.set_num_threads(1)
    client = Client(request.param)
    yield client
    for connection in client.connections:
        connection.close()
    eventually(lambda: not threads("cable", "joined"))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def idle_server() -> Iterator[Server]:
    """Its loop does not run."""
    server = Server(run=False)
    yield server
    server.close()


@pytest.fixture
def large_server() -> Iterator[Server]:
    """A slot takes 3 MiB one way and 2 MiB the other."""
    server = Server(slots=4, tokens=LARGE)
    yield server
    server.close()


def start(*arguments: object) -> subprocess.Popen[str]:
    """This file as a process of its own."""
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def other_process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server with large slots in a process of its own."""
    process = start("server")
    yield said(process), process
    end(process)


def some(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple:
    rng = np.random.default_rng(seed)
    x_TH = torch.from_numpy(rng.integers(-9, 9, (tokens, HIDDEN))).to(dtype)
    ids_TK = rng.integers(-1, EXPERTS, (tokens, TOP_K)).astype(np.int32)
    return x_TH, ids_TK, rng.random((tokens, TOP_K), dtype=np.float32)


def send(connection: Connection, request: tuple, layer: int = 1) -> Ticket:
    x_TH, ids_TK, scores_TK = request
    part = Part(0, np.arange(len(ids_TK)), ids_TK, float(ids_TK.size))
    return connection.submit(LayerInput.of(layer, x_TH, scores_TK), 1, part, 1.0)


@dataclass(frozen=True, eq=False)
class Result:
    """An answer that was copied out of its slot."""

    header: ResultHeader
    part_RH: torch.Tensor | None


def answer(connection: Connection, ticket: Ticket) -> Result:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        seen = connection.seq()
        found = connection.poll(ticket)
        if found is not None:
            if found.part_RH is None:
                return Result(found.header, None)
            part_RH = torch.from_numpy(found.part_RH.copy())
            if not connection.release(ticket):
                raise ConnectionLostError("taken back while it was read")
            return Result(found.header, part_RH)
        connection.wait(ticket, seen, deadline - time.monotonic())
    raise AssertionError("no answer")


def right(result: Result, request: tuple, layer: int = 1) -> bool:
    x_TH, ids_TK, scores_TK = request
    wanted = kernel(x_TH, torch.from_numpy(ids_TK), torch.from_numpy(scores_TK), layer)
    return result.part_RH is not None and torch.equal(result.part_RH, wanted)


def test_unknown_transport_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="shm, grpc, nixl"):
        opener("pigeon")


def test_nixl_without_its_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    why_not.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"^transport nixl: .*; pip install '.*\[nixl\]'$"):
            opener("nixl")
        assert "nixl" not in transports()
    finally:
        why_not.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, SLOT_TOKENS])
def test_round_trip(client: Client, server: Server, dtype: torch.dtype, tokens: int) -> None:
    connection = client.connect(server.address)
    assert connection.max_tokens(TOP_K, WIRE_DTYPES[dtype]) >= tokens
    request = some(tokens, dtype)
    assert right(answer(connection, send(connection, request)), request)
    assert connection.in_flight == 0


def test_full_large_slots(client: Client, large_server: Server) -> None:
    connection = client.connect(large_server.address)
    assert connection.max_tokens(TOP_K, WIRE_DTYPES[torch.float32]) == LARGE
    requests = [some(LARGE, seed=seed) for seed in range(4)]
    for _ in range(3):
        tickets = [send(connection, request) for request in requests]
        for ticket, request in zip(tickets, requests, strict=True):
            assert right(answer(connection, ticket), request)


def test_two_hundred_requests_in_order(client: Client, server: Server) -> None:
    connection = client.connect(server.address)
    for i in range(200):
        request = some(1 + i % SLOT_TOKENS, seed=i)
        assert right(answer(connection, send(connection, request, i % 2)), request, i % 2)


def test_answers_in_another_order(client: Client, idle_server: Server) -> None:
    connection = client.connect(idle_server.address)
    slot_of: dict[int, int] = {}
    tickets = []
    for i in range(4):
        tickets.append(send(connection, some(2, seed=i)))
        eventually(lambda i=i: len(idle_server.written()) == i + 1)
        slot_of[i] = next(s for s in idle_server.written() if s not in slot_of.values())
    with pytest.raises(SlotsBusyError):
        send(connection, some(1))
    for i in (2, 0, 3, 1):
        idle_server.loop.serve([slot_of[i]])
        assert right(answer(connection, tickets[i]), some(2, seed=i))
    assert connection.in_flight == 0


def test_an_unknown_expert_is_a_stale_placement(client: Client, server: Server) -> None:
    connection = client.connect(server.address)
    server.loop.epoch = 7
    x_TH, ids_TK, scores_TK = some(2)
    ids_TK[0, 0] = EXPERTS
    result = answer(connection, send(connection, (x_TH, ids_TK, scores_TK)))
    assert result.header.status == Status.STALE_PLACEMENT
    assert result.header.detail == 7


def test_a_wrong_request_takes_no_slot(client: Client, server: Server) -> None:
    connection = client.connect(server.address)
    x_TH, ids_TK, scores_TK = some(2)
    with pytest.raises(WrongRequestError, match="hidden size"):
        send(connection, (x_TH[:, :-1], ids_TK, scores_TK))
    with pytest.raises(WrongRequestError, match="float64"):
        send(connection, (x_TH.double(), ids_TK, scores_TK))
    result = answer(connection, send(connection, some(1), layer=9))
    assert result.header.status == Status.INVALID_ARGUMENT
    assert connection.in_flight == 0


def test_nan_and_infinity_stay_in_their_row(client: Client, server: Server) -> None:
    connection = client.connect(server.address)
    x_TH, _, scores_TK = some(4)
    ids_TK = np.ones((4, TOP_K), dtype=np.int32)
    clean = answer(connection, send(connection, (x_TH, ids_TK, scores_TK))).part_RH
    x_TH[1, 2], x_TH[1, 3] = torch.nan, torch.inf
    dirty = answer(connection, send(connection, (x_TH, ids_TK, scores_TK))).part_RH
    assert clean is not None
    assert dirty is not None
    assert torch.equal(dirty[[0, 2, 3]], clean[[0, 2, 3]])
    assert not dirty[1].isfinite().all()


def test_a_late_answer_is_dropped_and_counted(client: Client, idle_server: Server) -> None:
    connection = client.connect(idle_server.address, slots=1)
    connection.abandon(send(connection, some(3, seed=1)), overdue=True)
    eventually(idle_server.written)
    assert connection.owes_answer()
    with pytest.raises(SlotsBusyError):
        send(connection, some(3, seed=2))
    idle_server.loop.serve(idle_server.written())
    eventually(lambda: not connection.owes_answer())
    assert client.late_answers() == 1
    ticket = send(connection, some(3, seed=2))
    eventually(idle_server.written)
    idle_server.loop.serve(idle_server.written())
    assert right(answer(connection, ticket), some(3, seed=2))


def test_a_new_connection_has_a_new_generation_and_no_old_answers(
    client: Client, idle_server: Server
) -> None:
    old = client.connect(idle_server.address)
    ticket = send(old, some(1, seed=1))
    eventually(idle_server.written)
    # The same client again: what it held before is taken back, in the middle of the loop's round.
    ready = idle_server.written()
    new = client.connect(idle_server.address)
    idle_server.loop.serve(ready)
    with pytest.raises(ConnectionLostError):
        answer(old, ticket)
    assert new._link.generation > old._link.generation
    ticket = send(new, some(1, seed=2))
    eventually(idle_server.written)
    idle_server.loop.serve(idle_server.written())
    assert right(answer(new, ticket), some(1, seed=2))


def test_the_server_takes_its_slots_back(client: Client, idle_server: Server) -> None:
    connection = client.connect(idle_server.address)
    ticket = send(connection, some(1))
    eventually(idle_server.written)
    waiter = threading.Thread(target=idle_server.table.revoke_all)
    waiter.start()
    with pytest.raises(ConnectionLostError):
        answer(connection, ticket)
    waiter.join()
    with pytest.raises(ConnectionLostError):
        send(connection, some(1))
    assert client.lost == [connection]


def test_closing_under_a_waiter(client: Client, idle_server: Server) -> None:
    connection = client.connect(idle_server.address)
    ticket = send(connection, some(1))
    eventually(idle_server.written)
    closer = threading.Thread(target=connection.close)
    closer.start()
    with pytest.raises(ConnectionLostError):
        answer(connection, ticket)
    closer.join()
    with pytest.raises(ValueError, match="closed"):
        _ = connection._link.arena.buffer
    connection.wake()
    assert not connection.owes_answer()
    eventually(lambda: not idle_server.table.clients())


def test_sixty_four_clients_at_once(client: Client, server: Server) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        connection = client.connect(server.address, f"client-{number}", SLOTS // 64)
        for i in range(5):
            request = some(1 + i % SLOT_TOKENS, seed=number * 100 + i)
            if not right(answer(connection, send(connection, request)), request):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(64)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(client.connections) == 64
    assert not wrong


def test_nothing_is_left_after_closing(client: Client, server: Server) -> None:
    def one_more(seed: int) -> None:
        connection = client.connect(server.address)
        abandoned = send(connection, some(1))
        request = some(2, seed=seed)
        assert right(answer(connection, send(connection, request)), request)
        connection.abandon(abandoned, overdue=True)
        connection.close()

    def held() -> tuple[int, int, int]:
        eventually(lambda: not threads("cable", "joined", "exchange", "peer-ended"))
        # gRPC keeps its workers, up to a number.
        own = [t for t in threading.enumerate() if not t.name.startswith("grpc_")]
        return len(os.listdir("/proc/self/fd")), segments_mapped(), len(own)

    for seed in range(5):  # What is made once for a process.
        one_more(seed)
    before = held()
    for seed in range(100):
        one_more(seed)
    # gRPC lets go of sockets a little later.
    eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    assert not server.table.clients()
    # All slots can be had again, in one piece.
    eventually(lambda: server.table.grant("everything", 1, SLOTS))


def test_a_server_that_dies_before_the_link(
    client: Client, other_process: tuple[str, subprocess.Popen[str]]
) -> None:
    address, process = other_process
    granted, channel = client.grant(address)
    end(process)
    # Some transports see it at once.
    with contextlib.suppress(ConnectionLostError):
        connection = client.open(granted, channel)
        eventually(lambda: connection.lost_reason)
        send(connection, some(1))
        raise AssertionError("written to a dead server")


def test_a_server_that_dies_before_the_first_write(
    client: Client, other_process: tuple[str, subprocess.Popen[str]]
) -> None:
    address, process = other_process
    connection = client.connect(address)
    end(process)
    with pytest.raises(ConnectionLostError):
        answer(connection, send(connection, some(1)))
    eventually(lambda: client.lost == [connection])


def test_a_server_that_dies_with_a_request_in_flight(
    client: Client, other_process: tuple[str, subprocess.Popen[str]]
) -> None:
    address, process = other_process
    connection = client.connect(address)
    request = some(2)
    assert right(answer(connection, send(connection, request)), request)
    process.send_signal(signal.SIGSTOP)  # So that it cannot answer before it dies.
    ticket = send(connection, some(2))
    started = time.monotonic()
    process.kill()
    with pytest.raises(ConnectionLostError):
        answer(connection, ticket)
    assert time.monotonic() - started < 1.0
    assert client.lost == [connection]


def test_a_server_that_dies_while_it_answers(
    client: Client, other_process: tuple[str, subprocess.Popen[str]]
) -> None:
    address, process = other_process
    connection = client.connect(address)
    requests = [some(LARGE, seed=seed) for seed in range(4)]
    tickets = [send(connection, request) for request in requests]
    assert right(answer(connection, tickets[0]), requests[0])
    process.kill()
    for ticket, request in zip(tickets[1:], requests[1:], strict=True):
        with contextlib.suppress(ConnectionLostError):
            assert right(answer(connection, ticket), request)
    eventually(lambda: client.lost == [connection])


@pytest.mark.parametrize("step", ["connected", "asking", "answered"])
def test_a_client_that_dies(client: Client, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_endpoint, "GRACE_S", 0.2)
    large_server = Server(slots=4, tokens=LARGE, run=step != "asking")
    process = start("client", client.transport, large_server.address, step)
    assert said(process) == step
    end(process)
    if client.transport == "shm":
        large_server.table.revoke_lives("other", 1)  # No stream ends: this is the lease's part.
    # Its slots come back, and they work.
    eventually(lambda: not large_server.table.clients())
    box: list[Connection] = []
    eventually(lambda: box.append(tried(lambda: client.connect(large_server.address))) or box[-1])
    tickets = [send(box[-1], some(LARGE, seed=seed)) for seed in range(4)]
    if step == "asking":
        eventually(lambda: len(large_server.written()) == 4)
        large_server.loop.serve(large_server.written())
    for seed, ticket in enumerate(tickets):
        assert right(answer(box[-1], ticket), some(LARGE, seed=seed))
    box[-1].close()
    large_server.close()


def tried(connect: Callable[[], Connection]) -> Connection | None:
    """None while the slots are not there yet."""
    try:
        return connect()
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return None
        raise


def test_a_stopped_server_owes_an_answer_and_pays_it(
    client: Client, other_process: tuple[str, subprocess.Popen[str]]
) -> None:
    address, process = other_process
    connection = client.connect(address)
    process.send_signal(signal.SIGSTOP)
    ticket = send(connection, some(2))
    seen = connection.seq()
    connection.wait(ticket, seen, 0.1)
    assert connection.poll(ticket) is None
    connection.abandon(ticket, overdue=True)
    assert connection.owes_answer()
    process.send_signal(signal.SIGCONT)
    eventually(lambda: not connection.owes_answer())
    assert client.late_answers() == 1
    request = some(3, seed=5)
    assert right(answer(connection, send(connection, request)), request)
    assert connection.lost_reason is None


def be_a_client(transport: str, address: str, step: str) -> None:
    """Get as far as `step`, say so, and go on until killed."""
    client = Client(transport)
    connection = client.connect(address, "other")
    if step == "asking":
        for seed in range(4):
            send(connection, some(LARGE, seed=seed))
    print(step, flush=True)
    while step == "answered":
        answer(connection, send(connection, some(LARGE)))
    signal.pause()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "client":
        be_a_client(*sys.argv[2:])
    tiny = Server(slots=16, tokens=LARGE)  # gRPC ends a server that nobody holds.
    print(tiny.address, flush=True)
    signal.pause()
