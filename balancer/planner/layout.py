"""Lays out experts over servers that join and leave, when the balancer's planner needs a new layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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

    @property
    def redundancy(self) -> int:
        """Servers that should hold each expert; all of them if there are fewer."""
        return self._redundancy

    @property
    def levels(self) -> bool:
        """Whether the planner's repair evens out an uneven placement that nobody requested."""
        return True

    def first(self, layers: int, experts: int, servers: tuple[str, ...]) -> tuple[Holds, Shares]:
        """Lay out experts on servers that hold nothing: holds and shares, bool and float (L, S, E)."""
        return spread(layers, experts, len(servers), self.redundancy)

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
        return even_LSE, even_shares(even_LSE)
