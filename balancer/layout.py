"""Who decides what a placement looks like where servers come and go; the planner decides when."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from balancer.policies.repair import even_shares, repair
from balancer.policies.spread import spread

__all__ = ["EvenLayout", "Holds", "Layout", "Shares"]

Holds = npt.NDArray[np.bool_]
Shares = npt.NDArray[np.floating]


class Layout(Protocol):
    """Layouts by need: the first one, and one around what is held already."""

    @property
    def levels(self) -> bool:
        """Whether what is not as even as can be is to be changed, unless it was wanted so."""

    @property
    def redundancy(self) -> int:
        """Servers that hold each expert."""

    def first(self, layers: int, experts: int, servers: tuple[str, ...]) -> tuple[Holds, Shares]:
        """Of servers that hold nothing: bool and float (L, S, E)."""

    def around(
        self, servers: tuple[str, ...], holds_LSE: Holds, shares_LSE: Shares
    ) -> tuple[Holds, Shares]:
        """For these servers, of which new ones hold nothing.

        Args:
            servers: That there are to be.
            holds_LSE: bool (L, S, E); what they hold.
            shares_LSE: float (L, S, E); 0 where nothing is known. Of an expert whose servers have gone
                they are all 0.
        """


class EvenLayout:
    """The same number of replicas for each expert, levelled over servers, whatever the load is.

    Args:
        redundancy: Servers that hold each expert; all of them while there are fewer.
    """

    levels = True

    def __init__(self, redundancy: int) -> None:
        self.redundancy = redundancy

    def first(self, layers: int, experts: int, servers: tuple[str, ...]) -> tuple[Holds, Shares]:
        """See `Layout`."""
        return spread(layers, experts, len(servers), self.redundancy)

    def around(
        self, servers: tuple[str, ...], holds_LSE: Holds, shares_LSE: Shares
    ) -> tuple[Holds, Shares]:
        """See `Layout`: with as few loads as there can be."""
        even_LSE = repair(holds_LSE, self.redundancy)
        return even_LSE, even_shares(even_LSE)
