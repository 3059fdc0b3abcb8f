"""A connection's link to an expert server: the granted slots, and a way to signal the server."""

from __future__ import annotations

from typing import Protocol

from attention_client.exchange import Slots
from eaas.wire import Arena
from eaas.wire.slot import DOORBELL

__all__ = ["Link", "slots_of"]


class Link(Protocol):
    """A connection's transport: an arena with the granted slots, and a way to signal the server.

    The arena's generation words are those of the grant.
    """

    # Name of the transport: shm, grpc or nixl.
    transport: str
    arena: Arena
    first_slot: int
    slots: int
    # Most bytes of a payload and of a result in a granted slot; the arena's slots may be larger.
    payload_capacity: int
    result_capacity: int
    reply_doorbell: int
    generation: int
    # Whether the server itself polls the arena and hears its doorbell.
    direct: bool

    def notify(self, slot: int) -> None:
        """Tell the server that this slot holds a new request (by doorbell, frame or write)."""

    def close(self) -> None:
        """Give the slots back to the server and end the link's threads.

        Called once; the connection closes the arena.
        """


def slots_of(link: Link, hidden_size: int) -> Slots:
    """Map the slots of a link, for the connection and for compiled layer calls."""
    arena = link.arena
    return Slots(
        arena.buffer,
        *arena.offsets,
        arena.request_stride,
        arena.result_stride,
        link.first_slot,
        link.slots,
        link.payload_capacity,
        link.result_capacity,
        link.reply_doorbell,
        DOORBELL,
        link.generation,
        hidden_size,
        link.direct,
    )
