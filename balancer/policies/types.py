"""Types of the placement policies: input (Problem), output (Layout), and the measured output (Plan).

layout   which server holds which expert of a layer (holds), and which share of an expert's load each of its
         holders takes (shares)
slot     place for one expert of one layer on one server
replica  an expert of a layer on a server
PAR      peak-to-average ratio of the servers' loads in a layer; 1.0 is perfect balance
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from balancer.policies.anti_affinity import Nodes
from balancer.policies.moves import Move, layer_moves
from balancer.policies.sparse import Layout

__all__ = ["Float", "Holds", "Int", "Layout", "Move", "Plan", "Problem", "Shares"]

Holds = npt.NDArray[np.bool_]  # (L, S, E)
Shares = npt.NDArray[np.float64]  # (L, S, E); over S they sum to 1 for each expert
Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Problem:
    """The checked input of a policy, made by `make_problem` for every call of `plan`.

    Attributes:
        load_LE: float64 (L, E), at least 0; any unit.
        slots_LS: int64 (L, S): experts of the layer that the server may hold, at most E.
        asked_LS: The slots as given, possibly above E; EPLB counts them.
        speeds_S: float64 (S), above 0: load that a server processes in a unit of time.
        current: The current layout; None: unknown.
        shares_known: Whether the current layout's shares are known; else they are equal.
        nodes: The servers' nodes, which replicas of an expert then do not share; None: unknown.
    """

    load_LE: Float
    slots_LS: Int
    asked_LS: Int
    speeds_S: Float
    current: Layout | None = None
    shares_known: bool = False
    nodes: Nodes | None = None

    @property
    def layers(self) -> int:
        """Number of layers with routed experts (L)."""
        return int(self.load_LE.shape[0])

    @property
    def experts(self) -> int:
        """Number of routed experts per layer (E), each counted once."""
        return int(self.load_LE.shape[1])

    @property
    def servers(self) -> int:
        """Number of expert servers that the plan is for (S)."""
        return int(self.slots_LS.shape[1])

    @property
    def slots_L(self) -> Int:
        """int64 (L): most replicas that each layer can have, counting each expert's first."""
        slots_L: Int = self.slots_LS.sum(axis=1)
        return slots_L

    @property
    def current_LSE(self) -> Holds | None:
        """The current holds, dense (`Layout.holds_LSE`); None: unknown."""
        return None if self.current is None else self.current.holds_LSE


@dataclass(frozen=True, eq=False)
class Plan:
    """A policy's layout, its quality, and the moves to it.

    Attributes:
        policy: Name of the policy.
        layout: Which server holds which experts, and their shares; sparse.
        par_L: float64 (L): highest load / speed of a server over total load / total speed; 1.0
            for a layer without load.
        bound_L: float64 (L): no plan with these slots has a lower PAR.
        transit: Replicas that the plan adds to the current layout; 0 without `current`.
        problem: The policy's input.
    """

    policy: str
    layout: Layout = field(repr=False)
    par_L: Float = field(repr=False)
    bound_L: Float = field(repr=False)
    transit: int
    problem: Problem = field(repr=False)

    @property
    def holds_LSE(self) -> Holds:
        """bool (L, S, E), dense, for small clusters; `layout` has the same in less memory."""
        return self.layout.holds_LSE

    @property
    def shares_LSE(self) -> Shares:
        """float64 (L, S, E), dense, for small clusters: over S they sum to 1 for each expert."""
        return self.layout.shares_LSE

    @property
    def gap_L(self) -> Float:
        """float64 (L): the plan's PAR over its lower bound; 1.0 is proven optimal. For reports."""
        return self.par_L / self.bound_L

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Moves from `current` to this plan, in a safe order (`ordered_moves`); empty without `current`."""
        before = self.problem.current
        if before is None:
            return ()
        differs_L = (self.layout.added_to(before) > 0) | (before.added_to(self.layout) > 0)
        found: list[Move] = []
        for layer in np.flatnonzero(differs_L).tolist():
            # A layer at a time, so that no dense array is larger than S x E.
            now_SE, then_SE = (x.part(layer, layer + 1).holds_LSE[0] for x in (before, self.layout))
            found += layer_moves(layer, now_SE, then_SE, self.problem.slots_LS[layer])
        return tuple(found)
