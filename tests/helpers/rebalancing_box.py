"""A cluster whose experts get what its test says, under whatever placement there is."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from balancer.main import Balancer
from control_plane import SHAPE, FakeExpertServer, eventually
from eaas.control_plane.balancer_client import BalancerClient
from eaas.types import Placement

__all__ = ["HOT", "NAMES", "Box", "E", "L"]

L, E = SHAPE.num_layers, SHAPE.num_experts
NAMES = ("s1", "s2", "s3", "s4")
HOT = [40, 1, 1, 8, 1, 1, 1, 20]


class Box:
    """A cluster in which tokens go where the placement says.

    Each look of the balancer finds as many more: a machine that holds threads up cannot make one server seem
    to have had more than another.
    """

    def __init__(
        self, balancer: Balancer, servers: list[FakeExpertServer], monitor: str = ""
    ) -> None:
        self.monitor = monitor
        self.servers = {s.name: s for s in servers}
        self.client = BalancerClient(balancer.address)
        self.balancer = balancer
        self.hot: list[int] = HOT
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow)
        self._followed: Placement | None = None
        for name, server in self.servers.items():
            server.on_read = partial(self._serve, name)

    def _follow(self) -> None:
        while not self.over.wait(0.02):
            self._followed = self.placement()

    def _serve(self, name: str) -> None:
        """What each expert gets is split over its servers by their shares, as `weights` clients do."""
        placement = self._followed
        if placement is None or name not in placement.servers:
            return
        share_LE = placement.shares_LSE[:, placement.servers.index(name)]
        self.servers[name].tokens_LE += np.rint(250 * share_LE * np.array(self.hot)).astype(
            np.int64
        )

    def placement(self) -> Placement:
        placement = self.client.placement()
        assert placement is not None
        return placement

    def par(self) -> float:
        """Of the load as it is, under the placement as it is."""
        load_LS = (self.placement().shares_LSE * np.array(self.hot)).sum(axis=2)
        return float((load_LS.max(axis=1) / load_LS.mean(axis=1)).mean())

    def at_rest(self) -> bool:
        return bool(self.balancer.rebalancer.snapshot().at_rest)

    def is_seen(self) -> bool:
        """Whether the balancer's window has the load as it is: its first look may have met a part of it."""
        answer = self.client.hotness()
        tokens_LE = np.array([layer.tokens for layer in answer.layers], np.float64)
        if answer.steps < 3 or not tokens_LE.size:
            return False
        share_LE = tokens_LE / tokens_LE.sum(axis=1, keepdims=True)
        return np.allclose(share_LE, np.array(self.hot) / sum(self.hot), rtol=0.05)

    def held(self, layer: int, expert: int) -> set[str]:
        """Servers that have it, by the placement and in truth."""
        eventually(self.at_rest)
        placement = self.placement()
        names = {s for i, s in enumerate(NAMES) if placement.holds_LSE[layer, i, expert]}
        assert names == {s for s, fake in self.servers.items() if expert in fake.held[layer]}
        return names
