"""An expert server's gRPC face over an arena, without a loop."""

from __future__ import annotations

from eaas.net.grpc_client import channel
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.wire import RequestHeader
from eaas.wire.header import WireDtype
from expert_server.transports.slot_ownership import Grant
from transport_bench import Server

__all__ = ["EndpointBox", "header_of"]


class EndpointBox(Server):
    """Four slots; the test acts as the client and as the loop."""

    def __init__(self) -> None:
        super().__init__(run=False, slots=4, tokens=8)
        self.channel = channel(self.address)
        self.stub = expert_pb2_grpc.ExpertServiceStub(self.channel)

    def close(self) -> None:
        """End the server."""
        self.channel.close()
        super().close()

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
