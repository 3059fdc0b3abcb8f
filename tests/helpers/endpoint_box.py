"""An expert server's gRPC face over an arena, without a loop."""

from __future__ import annotations

import time

from eaas.net.grpc_client import channel
from eaas.net.grpc_server import Service, serve
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import ModelShape
from eaas.wire import Arena, RequestHeader
from eaas.wire.header import WireDtype
from expert_server.experts.placements import PlacementHandler
from expert_server.load_report.hotness import HotnessHandler
from expert_server.service import SERVICE, ExpertService, add_expert_service
from expert_server.transports.slot_ownership import Grant, SlotTable
from expert_server.weights.sharing import CheckpointSharer

__all__ = ["EndpointBox", "header_of"]

SHAPE = ModelShape("tiny", 4, 8, 2, ("layer.0",), "float32", "digest")


class EndpointBox:
    """Four slots; the test acts as the client and as the loop."""

    def __init__(self) -> None:
        self.arena = Arena.create_local(4, 512, 512, time.monotonic_ns())
        self.table = SlotTable(self.arena)
        self.service = ExpertService(
            self.arena,
            self.table,
            SHAPE,
            PlacementHandler(None, SHAPE, print, print),  # type: ignore[arg-type]
            CheckpointSharer(None, 1),
            HotnessHandler(SHAPE, None, None),  # type: ignore[arg-type]
            lambda: None,
        )
        self.server = serve([Service(SERVICE, add_expert_service, self.service)], "127.0.0.1", 0)
        self.channel = channel(self.server.address)
        self.stub = expert_pb2_grpc.ExpertServiceStub(self.channel)

    def close(self) -> None:
        """End the server."""
        self.channel.close()
        self.service.close()
        self.server.stop(0)

    def grant(self, slots: int = 2) -> Grant:
        """Slots for the client."""
        grant = self.table.grant("client", 1, slots)
        assert grant is not None
        return grant

    def state(self, slot: int) -> int:
        """A slot's flag."""
        return self.arena.flags.load(slot)


def header_of(
    generation: int = 1,
    tokens: int = 1,
    hidden: int = 8,
    top_k: int = 2,
    dtype: WireDtype = WireDtype.FLOAT32,
) -> RequestHeader:
    """The header of a request."""
    return RequestHeader.of(
        dtype=dtype,
        generation=generation,
        request_id=1,
        epoch=1,
        budget_us=1,
        layer=0,
        batch_size=tokens,
        hidden_size=hidden,
        top_k=top_k,
    )
