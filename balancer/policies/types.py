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

from balancer.policies.apart import Nodes
from balancer.policies.moves import Move, ordered_moves

__all__ = ["Float", "Holds", "Int", "Layout", "Move", "Plan", "Problem", "Shares"]

Holds = npt.NDArray[np.bool_]  # (L, S, E)
Shares = npt.NDArray[np.float64]  # (L, S, E); over S they sum to 1 for each expert
Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Layout = tuple[Holds, Shares]


@dataclass(frozen=True, eq=False)
class Problem:
    """The checked input of a policy, made by `make_problem` for every call of `plan`.

    Attributes:
        load_LE: float64 (L, E), at least 0; any unit.
        slots_LS: int64 (L, S): experts of the layer that the server may hold, at most E.
        asked_LS: The slots as given, possibly above E; EPLB counts them.
        speeds_S: float64 (S), above 0: load that a server processes in a unit of time.
        current_LSE: The current holds; None: unknown.
        current_shares_LSE: The current shares; None: unknown.
        nodes: The servers' nodes, which replicas of an expert then do not share; None: unknown.
    """

    load_LE: Float
    slots_LS: Int
    asked_LS: Int
    speeds_S: Float
    current_LSE: Holds | None = None
    current_shares_LSE: Shares | None = None
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


@dataclass(frozen=True, eq=False)
class Plan:
    """A policy's layout, its quality, and the moves to it.

    Attributes:
        policy: Name of the policy.
        holds_LSE: bool (L, S, E).
        shares_LSE: float64 (L, S, E); 0 where not held; over S they sum to 1 for each expert.
        par_L: float64 (L): highest load / speed of a server over total load / total speed; 1.0
            for a layer without load.
        bound_L: float64 (L): no plan with these slots has a lower PAR.
        transit: Replicas that the plan adds to the current layout; 0 without `current`.
        problem: The policy's input.
    """

    policy: str
    holds_LSE: Holds = field(repr=False)
    shares_LSE: Shares = field(repr=False)
    par_L: Float = field(repr=False)
    bound_L: Float = field(repr=False)
    transit: int
    problem: Problem = field(repr=False)

    @property
    def gap_L(self) -> Float:
        """float64 (L): the plan's PAR over its lower bound; 1.0 is proven optimal. For reports."""
        return self.par_L / self.bound_L

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Moves from `current` to this plan, in a safe order (`ordered_moves`); empty without `current`."""
        current_LSE = self.problem.current_LSE
        if current_LSE is None:
            return ()
        return ordered_moves(current_LSE, self.holds_LSE, self.problem.slots_LS)
