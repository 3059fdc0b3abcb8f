"""A server and a client of slots without a model, for the conformance suite of the transports.

As a program, this module is the server or the client that some tests kill.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from attention_client.connections.connection import Connection
from attention_client.connections.messages import LayerInput, Ticket
from attention_client.connections.transports import opener, requested
from attention_client.dispatch.parts import Part
from attention_client.telemetry.metrics import ClientMetrics
from eaas.errors import ConnectionLostError
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.net.grpc_client import channel as open_channel
from eaas.net.grpc_server import Service, serve
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.telemetry import Tracing
from eaas.types import ModelShape
from eaas.wire import Arena, ResultHeader, SlotState
from eaas.wire.header import VERSION, WireDtype, payload_layout, result_length
from eaas_cli.local.process import ChildProcess
from expert_server.experts.placements import PlacementHandler
from expert_server.load_report.hotness import HotnessHandler
from expert_server.loop.loop import ServeLoop
from expert_server.loop.tracing import BatchTraces
from expert_server.service import SERVICE, ExpertService, add_expert_service
from expert_server.transports.slot_ownership import SlotTable
from expert_server.weights.sharing import CheckpointSharer
from waiting import eventually

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
    """An expert server without a model or a monitor; without `run` the test is the loop."""

    def __init__(
        self,
        *,
        run: bool = True,
        slots: int = SLOTS,
        tokens: int = SLOT_TOKENS,
        tracing: Tracing | None = None,
    ) -> None:
        payload = payload_layout(tokens, HIDDEN, TOP_K, WireDtype.FLOAT32).total
        self.arena = Arena.create_shared(
            slots, payload, result_length(tokens, HIDDEN), time.monotonic_ns()
        )
        self.table = SlotTable(self.arena)
        traces = BatchTraces(tracing, "server") if tracing is not None else None
        self.loop = ServeLoop(self.arena, self.table, kernel, SHAPE, 20, traces=traces)
        self.service = ExpertService(
            self.arena,
            self.table,
            SHAPE,
            PlacementHandler(None, SHAPE, print, print),
            CheckpointSharer(None, 1),
            HotnessHandler(SHAPE, None, None),
            lambda: None,
        )
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
    """Opens connections and keeps them for the end of the test."""

    def __init__(self, transport: str, checksum: bool = False) -> None:
        self.transport = transport
        self.checksum = checksum
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
            transport=requested(self.transport),
            slots=slots,
            slot_tokens=1 << 16,
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
            "server",
            1,
            link,
            HIDDEN,
            20,
            self.checksum,
            self.lost.append,
            channel.close,
            self.metrics,
        )
        box.append(connection)
        if early:
            connection.lose(early[0])
        self.connections.append(connection)
        return connection

    def late_answers(self) -> float:
        return float(self.metrics.late_answers._value.get())


def threads(*names: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in names]


def segments_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/")


def end(process: ChildProcess) -> None:
    """Kill a process, also a stopped one."""
    process.signal(signal.SIGKILL)
    assert process.reap(PATIENCE_S)


def pause(process: ChildProcess) -> None:
    """Stop a process, and return when none of its threads runs: they may for a moment after the signal."""
    process.signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    eventually(
        lambda: all(
            (one / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for one in threads.iterdir()
        )
    )


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


def tried(connect: Callable[[], Connection]) -> Connection | None:
    """Connect; None while no slots are free."""
    try:
        return connect()
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return None
        raise


def be_a_client(transport: str, address: str, step: str) -> None:
    """Reach `step`, announce it, and go on until killed."""
    client = Client(transport)
    connection = client.connect(address, "other")
    if step == "asking":
        for seed in range(4):
            send(connection, some(LARGE, seed=seed))
    announce(ready=step)
    while step == "answered":
        answer(connection, send(connection, some(LARGE)))
    signal.pause()


if __name__ == "__main__":
    # Where a package with transport `tcp` is installed.
    sys.path.insert(0, sys.argv.pop())
    bind_to_launcher()
    torch.set_num_threads(1)
    if sys.argv[1] == "client":
        be_a_client(*sys.argv[2:])
    tiny = Server(slots=16, tokens=LARGE)  # gRPC ends a server without a reference.
    announce(ready=tiny.address)
    signal.pause()
