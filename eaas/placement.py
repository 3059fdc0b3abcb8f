"""A placement: which server holds which replicas, and its messages."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from eaas.replicas import Replicas
from eaas.rpc.v1 import common_pb2 as pb

__all__ = ["Placement"]

# Limit: ten thousand servers with a model of 61 layers of 256 experts.
_MOST_CELLS = 1 << 28
# Limit of a model's experts, all layers together: 8 bytes each, even without a server.
_MOST_EXPERTS = 1 << 22
# Tolerance for rounding, because float32 shares sum to 1 only approximately.
_MOST_SHARE = 1.001


class Placement:
    """Placement of experts: which server holds which replicas, and each replica's share of the tokens.

    Do not change its arrays. It makes the other form of its replicas, dense or sparse, when asked for.

    Attributes:
        epoch: Version; 0 means no placement yet.
        servers: Server ids, in the order of the arrays' axis S.
        shape: (L, S, E).
    """

    def __init__(
        self,
        epoch: int,
        servers: tuple[str, ...],
        holds_LSE: npt.NDArray[np.bool_],
        shares_LSE: npt.NDArray[np.float32],
    ) -> None:
        """Make it of dense arrays.

        Args:
            epoch, servers: See above.
            holds_LSE: bool (L, S, E).
            shares_LSE: float32 (L, S, E); sums to 1 over S for each expert, 0 where not held.

        Raises:
            ValueError: The arrays' shapes differ, or S is not the number of servers.
        """
        if holds_LSE.ndim != 3 or holds_LSE.shape != shares_LSE.shape:
            raise ValueError(f"holds_LSE {holds_LSE.shape}, shares_LSE {shares_LSE.shape}")
        if holds_LSE.shape[1] != len(servers):
            raise ValueError(f"{len(servers)} servers, holds_LSE {holds_LSE.shape}")
        self.epoch, self.servers = epoch, servers
        self.shape: tuple[int, int, int] = holds_LSE.shape
        self._dense = holds_LSE, shares_LSE

    @classmethod
    def of_replicas(cls, epoch: int, servers: tuple[str, ...], replicas: Replicas) -> Self:
        """Make it of sparse replicas, whose number of servers is `len(servers)`."""
        made = cls.__new__(cls)
        made.epoch, made.servers = epoch, servers
        made.shape = replicas.layers, replicas.servers, replicas.experts
        made.__dict__["replicas"] = replicas
        return made

    def __repr__(self) -> str:
        return f"Placement(epoch={self.epoch}, servers={self.servers}, shape={self.shape})"

    @cached_property
    def replicas(self) -> Replicas:
        """The replicas, sparse."""
        return Replicas.of(*self._dense)

    @property
    def holds_LSE(self) -> npt.NDArray[np.bool_]:
        """bool (L, S, E). Large with thousands of servers: `replicas` has the same."""
        return self._dense[0]

    @property
    def shares_LSE(self) -> npt.NDArray[np.float32]:
        """float32 (L, S, E); sums to 1 over S for each expert, 0 where not held. Large, as `holds_LSE`."""
        return self._dense[1]

    @cached_property
    def _dense(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
        return self.replicas.dense()

    def holdings_of(self, server_id: str) -> list[pb.Holding]:
        """Return a server's replicas and shares by layer, all empty if it has none; for the roll-out."""
        if server_id not in self.servers:
            return [pb.Holding() for _ in range(self.shape[0])]
        return self._holdings(self.servers.index(server_id))

    def _holdings(self, server: int) -> list[pb.Holding]:
        return [
            pb.Holding(experts=experts, shares=shares)
            for experts, shares in self.replicas.of_server(server)
        ]

    def to_proto(self) -> pb.Placement:
        """Convert the placement to its message, for the balancer's messages or a call to it."""
        num_layers, _, num_experts = self.shape
        servers = [
            pb.ServerPlacement(server_id=server_id, layers=self._holdings(s))
            for s, server_id in enumerate(self.servers)
        ]
        return pb.Placement(
            epoch=self.epoch, num_layers=num_layers, num_experts=num_experts, servers=servers
        )

    @classmethod
    def from_proto(cls, message: pb.Placement) -> Self:
        """Convert a received message to a placement. Raises ValueError if it is inconsistent."""
        # Checked first, because a small message could ask for all memory.
        model = message.num_layers * (message.num_experts + 1)
        cells = message.num_layers * max(1, len(message.servers)) * message.num_experts
        if model > _MOST_EXPERTS or cells > _MOST_CELLS:
            raise ValueError(
                f"a placement of {message.num_layers} layers, {len(message.servers)} servers and "
                f"{message.num_experts} experts: {_MOST_EXPERTS} experts of all layers, and {_MOST_CELLS} "
                "of them on all servers, at most"
            )
        names = tuple(server.server_id for server in message.servers)
        for name, times in Counter(names).items():
            if times > 1:
                raise ValueError(f"{name} is {times} times in the placement")
        experts: list[int] = []
        shares: list[float] = []
        counts: list[int] = []
        for server in message.servers:
            if len(server.layers) != message.num_layers:
                raise ValueError(
                    f"{server.server_id}: {len(server.layers)} layers in the placement"
                )
            for layer, holding in enumerate(server.layers):
                experts += holding.experts
                shares += holding.shares
                counts.append(len(holding.experts))
                if len(experts) != len(shares):
                    raise _wrong_experts(server, layer)
        expert_N, share_N = np.array(experts, np.int64), np.array(shares, np.float32)
        layers = max(message.num_layers, 1)
        place_N = np.repeat(np.arange(len(counts)), counts)
        for n in np.flatnonzero(expert_N >= message.num_experts)[:1]:
            server = message.servers[int(place_N[n]) // layers]
            raise _wrong_experts(server, int(place_N[n]) % layers)
        # Also False for NaN.
        if not ((share_N >= 0) & (share_N <= _MOST_SHARE)).all():
            raise ValueError("a share of the placement is not between 0 and 1")
        replicas = Replicas.of_list(
            (message.num_layers, len(message.servers), message.num_experts),
            place_N % layers,
            place_N // layers,
            expert_N,
            share_N,
        )
        return cls.of_replicas(message.epoch, names, replicas)


def _wrong_experts(server: pb.ServerPlacement, layer: int) -> ValueError:
    return ValueError(f"{server.server_id}: wrong experts in layer {layer}")
