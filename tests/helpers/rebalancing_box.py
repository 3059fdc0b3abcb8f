"""A cluster whose experts get what its test says, under whatever placement there is."""

from __future__ import annotations

import threading

import numpy as np

from balancer.main import Balancer
from control_plane import SHAPE, FakeExpertServer, eventually
from eaas.balancer_client import BalancerClient
from eaas.types import Placement

__all__ = ["HOT", "NAMES", "Box", "E", "L"]

L, E = SHAPE.num_layers, SHAPE.num_experts
NAMES = ("s1", "s2", "s3", "s4")
HOT = [40, 1, 1, 8, 1, 1, 1, 20]


class Box:
    """A cluster in which tokens go where the placement says."""

    def __init__(
        self, balancer: Balancer, servers: list[FakeExpertServer], monitor: str = ""
    ) -> None:
        self.monitor = monitor
        self.servers = {s.session._member.id: s for s in servers}
        self.client = BalancerClient(balancer.address)
        self.balancer = balancer
        self.hot: list[int] = HOT
        self.dead: set[str] = set()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        """What each expert gets is split over its servers by their shares, as `weights` clients do."""
        while not self.over.wait(0.02):
            placement = self.client.placement()
            assert placement is not None
            # What a dead server does not answer goes to the others that have it.
            alive_S = np.array([name not in self.dead for name in placement.servers])
            shares_LSE = placement.shares_LSE * alive_S[:, None]
            shares_LSE /= shares_LSE.sum(axis=1, keepdims=True)
            for s, name in enumerate(placement.servers):
                tokens = np.rint(50 * shares_LSE[:, s] * np.array(self.hot))
                self.servers[name].tokens_LE += tokens.astype(np.int64)

    def placement(self) -> Placement:
        placement = self.client.placement()
        assert placement is not None
        return placement

    def par(self) -> float:
        """Of the load as it is, under the placement as it is."""
        load_LS = (self.placement().shares_LSE * np.array(self.hot)).sum(axis=2)
        return float((load_LS.max(axis=1) / load_LS.mean(axis=1)).mean())

    def at_rest(self) -> bool:
        return bool(self.balancer.rebalancer.glimpse().at_rest)

    def kill(self, name: str) -> None:
        """A server that says no goodbye."""
        self.dead.add(name)
        self.servers[name].close(deregister=False)

    def held(self, layer: int, expert: int) -> set[str]:
        """Servers that have it, by the placement and in truth."""
        eventually(self.at_rest)
        placement = self.placement()
        names = {s for i, s in enumerate(NAMES) if placement.holds_LSE[layer, i, expert]}
        assert names == {s for s, fake in self.servers.items() if expert in fake.held[layer]}
        return names
