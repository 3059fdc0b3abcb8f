"""Lays out experts over servers that join and leave, when the balancer's planner needs a new layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from balancer.policies.anti_affinity import Nodes, apply_anti_affinity, count_on_one_node
from balancer.policies.repair import even_shares, repair
from balancer.policies.spread import spread

__all__ = ["Holds", "Layout", "Shares"]

Holds = npt.NDArray[np.bool_]
Shares = npt.NDArray[np.floating]


class Layout:
    """Even layouts: the same number of replicas for each expert, levelled over servers, regardless of load.

    Args:
        redundancy: Servers that hold each expert; all of them if there are fewer.
    """

    def __init__(self, redundancy: int) -> None:
        self._redundancy = redundancy
        self._nodes: Mapping[str, str] = {}

    @property
    def redundancy(self) -> int:
        """Servers that should hold each expert; all of them if there are fewer."""
        return self._redundancy

    @property
    def levels(self) -> bool:
        """Whether the planner's repair evens out an uneven placement that nobody requested."""
        return True

    def know(self, nodes: Mapping[str, str]) -> None:
        """Record the nodes of servers by id, for later layouts: an expert's replicas do not share one."""
        self._nodes = nodes

    def nodes_of(self, servers: Sequence[str]) -> Nodes:
        """Return the nodes of servers; an unknown server has its own."""
        return Nodes.of([self._nodes.get(s, s) for s in servers])

    def apart(
        self, servers: Sequence[str], holds_LSE: Holds, shares_LSE: Shares, held_LSE: Holds
    ) -> tuple[Holds, Shares]:
        """Put replicas of a layout on different nodes; every server keeps its number of replicas.

        Args:
            servers: Index S.
            holds_LSE, shares_LSE: The layout.
            held_LSE: What the servers hold now, to load as little as possible.
        """
        then_LSE, then_shares = np.array(holds_LSE), np.array(shares_LSE, np.float64)
        apply_anti_affinity(
            *(then_LSE, then_shares, self.nodes_of(servers)),
            current_LSE=held_LSE if held_LSE.any() else None,
            fixed_LSE=self._fixed(servers, holds_LSE),
            spread_over=self.redundancy,
        )
        return then_LSE, then_shares

    def gets_apart(self, servers: Sequence[str], holds_LSE: Holds, shares_LSE: Shares) -> bool:
        """Whether fewer experts of a layout can have all their replicas on one node."""
        nodes = self.nodes_of(servers)
        if nodes.count < 2 or not (alone := count_on_one_node(holds_LSE, nodes, replicas=2)):
            return False
        then_LSE, _ = self.apart(servers, holds_LSE, shares_LSE, holds_LSE)
        return count_on_one_node(then_LSE, nodes, replicas=2) < alone

    def _fixed(self, servers: Sequence[str], holds_LSE: Holds) -> Holds | None:
        """Return the replicas that stay where they are, bool (L, S, E); None: there are none."""
        return None

    def first(self, layers: int, experts: int, servers: tuple[str, ...]) -> tuple[Holds, Shares]:
        """Lay out experts on servers that hold nothing: holds and shares, bool and float (L, S, E)."""
        holds_LSE, shares_LSE = spread(layers, experts, len(servers), self.redundancy)
        return self.apart(servers, holds_LSE, shares_LSE, np.zeros_like(holds_LSE))

    def around(
        self, servers: tuple[str, ...], holds_LSE: Holds, shares_LSE: Shares
    ) -> tuple[Holds, Shares]:
        """Lay out experts around what these servers hold, with the fewest loads.

        Args:
            servers: The servers of the new layout.
            holds_LSE: bool (L, S, E); what they hold. New ones hold nothing.
            shares_LSE: float (L, S, E); 0 if unknown. All 0 for an expert whose servers are lost.
        """
        even_LSE = repair(holds_LSE, self.redundancy)
        return self.apart(servers, even_LSE, even_shares(even_LSE), holds_LSE)
