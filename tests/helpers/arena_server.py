"""Servers of layer calls with arenas in this process, and a view in which each of them holds every expert."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attention_client.connections.connection import Connection
from attention_client.connections.deadlines import HedgeBudget
from attention_client.dispatch import dispatch_policy
from attention_client.layer_call.shared import CallContext, ClusterView
from attention_client.telemetry.metrics import ClientMetrics
from eaas.types import Placement
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.slot import Status, WireDtype, reply_doorbell, request_views, result_view

__all__ = ["ArenaServer", "Views", "context_of"]

GENERATION = 7


class ArenaServer:
    """The link of its connection; it answers like experts whose weights are their number, plus one."""

    direct = True

    def __init__(
        self,
        name: str,
        metrics: ClientMetrics,
        hidden: int,
        slots: int,
        capacity: int,
        spin: int = 0,
    ) -> None:
        self.hidden = hidden
        self.arena = Arena.create_local(slots, capacity, capacity, 1)
        self.payload_capacity = self.arena.payload_capacity
        self.result_capacity = self.arena.result_capacity
        self.first_slot, self.slots, self.reply_doorbell = 0, slots, reply_doorbell(0)
        self.generation = GENERATION
        for slot in range(slots):
            self.arena.set_generation(slot, GENERATION)
        self.connection = Connection(
            name, 1, self, hidden, spin, False, lambda c: None, lambda: None, metrics
        )

    def notify(self, slot: int) -> None:
        """A request was written."""

    def close(self) -> None:
        """The connection has ended."""

    def waiting(self) -> list[int]:
        return self.arena.flags.scan(0, self.slots, SlotState.WRITTEN.mask)

    def header_of(self, slot: int) -> RequestHeader:
        return RequestHeader.unpack_from(self.arena.buffer, self.arena.request_offset(slot))

    def answer(self, slot: int, **changes: Any) -> None:
        """Answer a request; with other values of fields of the header."""
        header = self.header_of(slot)
        hidden, ids, scores = request_views(
            self.arena.buffer, self.arena.request_offset(slot), header
        )
        x_RH = torch.from_numpy(hidden)
        if header.dtype == WireDtype.BFLOAT16:
            x_RH = x_RH.view(torch.bfloat16)
        weight_R = np.where(ids >= 0, scores * (ids + 1), 0).sum(axis=1, dtype=np.float32)
        place = self.arena.result_offset(slot)
        out_RH = x_RH.float().numpy() * weight_R[:, None]
        result_view(self.arena.buffer, place, len(ids), self.hidden)[...] = out_RH
        status = changes.pop("status", Status.OK)
        is_ok = status is Status.OK
        fields = {
            "generation": header.generation,
            "request_id": header.request_id,
            "rows": len(ids) if is_ok else 0,
            "hidden_size": self.hidden if is_ok else 0,
            "service_us": 50,
        }
        ResultHeader.of(status, **(fields | changes)).pack_into(self.arena.buffer, place)
        assert self.arena.server_done(slot)
        self.arena.flags.ring(self.reply_doorbell)


@dataclass
class Views:
    """The last one counts."""

    views: list[ClusterView]

    def view(self) -> ClusterView:
        return self.views[-1]

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        time.sleep(timeout_s)


def context_of(
    servers: Sequence[ArenaServer],
    layers: int,
    experts: int,
    metrics: ClientMetrics,
    timeout_s: float,
    attempt_timeout_s: float,
) -> tuple[CallContext, list[ClusterView]]:
    """The context of calls to servers, and its views, to which the test may add."""
    holds_LSE = np.ones((layers, len(servers), experts), dtype=np.bool_)
    connections = tuple(server.connection for server in servers)
    names = tuple(connection.server_id for connection in connections)
    placement = Placement(3, names, holds_LSE, holds_LSE.astype(np.float32) / len(servers))
    views = [ClusterView(placement, connections)]
    policy, hedges = dispatch_policy("least_loaded"), HedgeBudget(0.0)
    return (
        CallContext(Views(views), policy, timeout_s, attempt_timeout_s, hedges, metrics),
        views,
    )
