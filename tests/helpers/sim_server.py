"""An expert server of a simulated cluster, and the streams to its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import torch

from balancer.planner.actions import Call, Inspect, Prepare
from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.spares import SpareReplicas, holdings, places
from eaas.wire import Arena, SlotState
from eaas.wire.frame import RESPONSE_FRAMES
from eaas.wire.header import WireDtype, payload_layout, result_length
from expert_server.experts.placements import PlacementHandler
from expert_server.loop.loop import ServeLoop
from expert_server.transports.endpoint import collect_answers
from expert_server.transports.grpc_endpoint import _Stream
from expert_server.transports.slot_ownership import SlotTable
from sim_clock import demand
from sim_process import (
    BREAK_S,
    CLIENT_SLOTS,
    FULL,
    HIDDEN,
    JOINING,
    LAYERS,
    SERVING,
    SHAPE,
    SLOTS,
    TOKENS,
    TOP_K,
    Process,
    Refused,
)

if TYPE_CHECKING:
    from cluster_sim import Simulation
    from sim_client import ClientProcess, Link


class Store:
    """The experts that a server holds, and since when."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.since: dict[tuple[int, int], float] = {}
        self.spares: frozenset[tuple[int, int]] = frozenset()

    @property
    def count(self) -> int:
        return len(self.since) - len(self.spares)

    def held(self) -> dict[int, list[int]]:
        held = self.since.keys() - self.spares
        return {layer: sorted(e for at, e in held if at == layer) for layer in range(LAYERS)}

    def digest(self, _layer: int, _expert: int) -> int:
        return 0

    def load(self, wanted: Any, is_given_up: Callable[[], bool], _digests: Any) -> int:
        for layer, experts in wanted.items():
            for expert in experts:
                self.since.setdefault((layer, expert), self.sim.now)
                self.spares -= {(layer, expert)}
        return 0

    def load_spares(self, wanted: Any, is_given_up: Callable[[], bool], _digests: Any) -> None:
        for place in sorted(wanted):
            if place not in self.since and not is_given_up():
                self.since[place] = self.sim.now
                self.spares |= {place}

    def unload_spares(self, kept: Any = ()) -> None:
        for place in self.spares.difference(kept):
            del self.since[place]
        self.spares = self.spares.intersection(kept)

    def unload(self, unwanted: Any) -> None:
        for layer, experts in unwanted.items():
            for expert in experts:
                self.since.pop((layer, expert), None)

    def holds_LE(self) -> np.ndarray:
        found_LE = np.zeros(FULL, dtype=bool)
        for layer, expert in self.since.keys() - self.spares:
            found_LE[layer, expert] = True
        return found_LE


class Context:
    """The part of gRPC's context that placement calls use."""

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(f"{code.name}: {details}")

    def is_active(self) -> bool:
        return True


class ServerProcess(Process):
    """Slots, loop and placement calls."""

    def start(self) -> None:
        self.disturbed_at = self.sim.now
        self.state = JOINING
        self.slow = 1.0
        total = payload_layout(TOKENS, HIDDEN, TOP_K, WireDtype.FLOAT32).total
        self.arena = Arena.create_local(SLOTS, total, result_length(TOKENS, HIDDEN), self.pid)
        self.table = SlotTable(self.arena)
        self.store = Store(self.sim)
        self.loop = ServeLoop(
            self.arena, self.table, self.compute, SHAPE, 0, clock=lambda: self.sim.now
        )
        self.placements = PlacementHandler(self.store, SHAPE, self.prepared, self.retired)
        self.streams: dict[str, Stream] = {}
        self.newest_epoch = 0
        self.join()

    def report(self) -> dict[str, Any]:
        return {"state": self.state, "experts": self.store.count, "epoch": self.placements.epoch}

    def prepared(self, epoch: int) -> None:
        self.state, self.loop.epoch = SERVING, epoch

    def retired(self, epoch: int) -> None:
        self.loop.epoch = epoch

    def reborn(self) -> None:
        self.disturbed_at = self.sim.now
        self.table.revoke_all()
        for stream in tuple(self.streams.values()):
            stream.break_soon("its lease was gone")

    def compute(self, x_TH: Any, ids_TK: Any, scores_TK: Any, layer: int) -> torch.Tensor:
        ids = ids_TK.numpy()
        for expert in set(ids[ids >= 0].tolist()):
            if (layer, expert) not in self.store.since:
                raise LookupError(f"layer {layer}, expert {expert} is not here")
        weights_T1 = (scores_TK * (ids_TK + 1) * (ids_TK >= 0)).sum(1, keepdim=True)
        return x_TH.float() * weights_T1

    def order(self, call: Call) -> tuple[Any, int] | None:
        """Execute a call of the balancer. Raises Refused."""
        if isinstance(call, Inspect):
            return self.store.holds_LE(), self.placements.ListExperts(None, Context()).epoch
        placement = call.placement
        layers = [common_pb2.Holding(experts=h.experts) for h in placement.holdings_of(self.id)]
        if isinstance(call, Prepare):
            request = pb.PreparePlacementRequest(epoch=placement.epoch, layers=layers)
            self.newest_epoch = max(self.newest_epoch, placement.epoch)
            self.placements.PreparePlacement(request, Context())
        else:
            before = self.sim.coverages()
            request = pb.RetirePlacementRequest(epoch=placement.epoch, layers=layers)
            self.placements.RetirePlacement(request, Context())
            demand(placement.epoch >= self.newest_epoch, f"{self.id} retired by an older epoch")
            self.newest_epoch = placement.epoch
            self.sim.check_retirement(self, placement.epoch, before)
        return None

    def hold_spares(self, spares: SpareReplicas) -> frozenset[tuple[int, int]]:
        """Execute HoldSpares; return what the slots hold. Raises Refused."""
        layers = holdings(spares.of(self.id), LAYERS)
        request = pb.HoldSparesRequest(epoch=spares.epoch, layers=layers, load_s=1e9)
        return places(self.placements.HoldSpares(request, Context()).layers)

    # -- data -------------------------------------------------------------------------------------

    def connect(self, client: ClientProcess) -> tuple[pb.ConnectResponse, Stream]:
        grant = self.table.grant(client.id, client.incarnation, CLIENT_SLOTS)
        if grant is None:
            raise Refused("no free slots")
        granted = pb.ConnectResponse(
            connection_id=grant.connection_id,
            generation=grant.generation,
            server_incarnation=self.pid,
            slots=grant.slots,
            payload_capacity=self.arena.payload_capacity,
            result_capacity=self.arena.result_capacity,
        )
        for old in [s for s in self.streams.values() if s.client is client]:
            old.break_soon("connected anew")
        stream = self.streams[grant.connection_id] = Stream(self, client, grant)
        return granted, stream

    def work(self) -> None:
        """Run the loop over the written slots."""
        ready = self.arena.flags.scan(0, SLOTS, SlotState.WRITTEN.mask)
        if ready:
            self.loop.serve(ready)
        for stream in tuple(self.streams.values()):
            stream.answer()


class Stream:
    """A stream between a client and a server: frames both ways, in order, until it breaks."""

    def __init__(self, server: ServerProcess, client: ClientProcess, grant: Any) -> None:
        self.sim, self.server, self.client, self.grant = server.sim, server, client, grant
        self.far = _Stream(server.arena, server.table)
        first = pb.ExchangeRequest(connection_id=grant.connection_id).SerializeToString()
        demand(self.far.receive(first), "the stream was not taken")
        self.link: Link | None = None
        self.broken = False

    def break_soon(self, why: str) -> None:
        """Break the stream; each end notices after a delay."""
        if self.broken:
            return
        self.broken = True
        self.server.streams.pop(self.grant.connection_id, None)
        dice = self.sim.dice
        self.server.soon(
            dice.uniform(0, 0.2), lambda: self.server.table.revoke(self.grant.connection_id)
        )
        if self.link is not None:
            self.client.soon(dice.uniform(0.001, 0.2), lambda: self.link.on_lost(why))

    def frame(self, sender: Process, to: Process, deliver: Callable[[], None]) -> None:
        """Send one frame. It arrives once, twice or late, or is lost, and then the stream breaks."""
        sim = self.sim
        if self.broken:
            return
        fate = sim.fate()
        if fate == "lost" or sim.is_cut(sender, to):
            sim.agenda.at(sim.now + sim.dice.uniform(*BREAK_S), lambda: self.break_soon("silence"))
            return

        def arrive() -> None:
            if sim.is_cut(sender, to):
                self.break_soon("cut")
            elif not to.alive:
                self.break_soon("the other end is gone")
            else:
                deliver()

        to_s = sim.delay_s()
        for extra_s in (0.0, sim.dice.uniform(0, 0.3)) if fate == "twice" else (0.0,):
            to.soon(to_s + extra_s, arrive)

    def ask(self, data: bytes) -> None:
        """Send a frame from the client."""

        def arrive() -> None:
            if self.broken:
                return
            if not self.far.receive(data):
                self.break_soon(self.far._refusal)
                return
            server = self.server
            server.soon(self.sim.dice.uniform(0.0005, 0.01) * server.slow, server.work)
            self.sim.spring(server)

        self.frame(self.client, self.server, arrive)

    def answer(self) -> None:
        """Send the loop's results from the server."""
        with self.server.table.copying(self.grant) as lives:
            arena = self.server.arena
            frames = collect_answers(arena, self.grant, RESPONSE_FRAMES.encode) if lives else None
        if frames is None:
            self.break_soon("the connection is over")
            return
        for data in frames:

            def arrive(data: bytes = data) -> None:
                if self.link is None or self.broken:
                    return
                if refusal := self.link._deliver(data):
                    self.break_soon(refusal)
                self.link.wake()

            self.frame(self.server, self.client, arrive)
