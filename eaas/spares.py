"""Spare replicas: replicas in servers' spare slots, beside a placement, which follow the load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from eaas.rpc.v1 import common_pb2 as pb

__all__ = ["SpareReplicas", "holdings", "places"]


@dataclass(frozen=True)
class SpareReplicas:
    """The replicas in all servers' spare slots.

    Clients may use them with the placement of the same epoch. They are soft state: a server that has lost
    one answers STALE_PLACEMENT. They never count for redundancy, coverage, repairs or drains.

    Attributes:
        epoch: Of the placement that they extend; 0 with no replica.
        held: (MoE layer, logical expert) pairs by server id; servers without any are left out.
    """

    epoch: int = 0
    held: Mapping[str, frozenset[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        held = {server: places for server, places in self.held.items() if places}
        object.__setattr__(self, "held", MappingProxyType(held))

    def __len__(self) -> int:
        """Return the number of replicas."""
        return sum(map(len, self.held.values()))

    def of(self, server_id: str) -> frozenset[tuple[int, int]]:
        """Return a server's (layer, expert) pairs."""
        return self.held.get(server_id, frozenset())

    def without(self, server_id: str) -> SpareReplicas:
        """Return the replicas of all other servers."""
        return SpareReplicas(self.epoch, {s: p for s, p in self.held.items() if s != server_id})

    def intersection(self, other: SpareReplicas) -> SpareReplicas:
        """Return the replicas that `other` has, too; the epochs must be equal."""
        return SpareReplicas(self.epoch, {s: p & other.of(s) for s, p in self.held.items()})

    def to_proto(self, num_layers: int) -> pb.SpareReplicas:
        """Convert to the message that clients are sent."""
        return pb.SpareReplicas(
            epoch=self.epoch,
            servers=[
                pb.ServerPlacement(server_id=server, layers=holdings(places, num_layers))
                for server, places in sorted(self.held.items())
            ],
        )

    @classmethod
    def from_proto(cls, message: pb.SpareReplicas) -> SpareReplicas:
        """Convert a received message. Raises ValueError if it has a server twice."""
        held = {server.server_id: places(server.layers) for server in message.servers}
        if len(held) != len(message.servers):
            raise ValueError("a server is twice in the spare replicas")
        return cls(message.epoch, held)


def holdings(held: Collection[tuple[int, int]], num_layers: int) -> list[pb.Holding]:
    """Convert (layer, expert) pairs to one message for each MoE layer."""
    layers = [pb.Holding() for _ in range(num_layers)]
    for layer, expert in sorted(held):
        layers[layer].experts.append(expert)
    return layers


def places(layers: Iterable[pb.Holding]) -> frozenset[tuple[int, int]]:
    """Convert one message for each MoE layer to (layer, expert) pairs."""
    return frozenset(
        (layer, expert) for layer, holding in enumerate(layers) for expert in holding.experts
    )
