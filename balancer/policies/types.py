"""What a policy is asked (Problem), what it answers (a layout), and what becomes of that (Plan).

layout   which server holds which expert of a layer (holds) and what part of an expert's load
         each of its holders takes (shares)
slot     room for one expert of one layer on one server
replica  an expert of a layer on a server
PAR      peak-to-average ratio of the servers' loads in a layer; 1.0 is perfect balance
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from balancer.policies.moves import Move, ordered_moves

__all__ = ["Float", "Holds", "Int", "Layout", "Move", "Plan", "Problem", "Shares", "make_plan"]

Holds = npt.NDArray[np.bool_]  # (L, S, E)
Shares = npt.NDArray[np.float64]  # (L, S, E); over S they sum to 1 for each expert
Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Layout = tuple[Holds, Shares]


@dataclass(frozen=True, eq=False)
class Problem:
    """One call's question, checked.

    Attributes:
        load_LE: float64 (L, E), at least 0; any unit.
        slots_LS: int64 (L, S): how many experts of the layer the server may hold.
        speeds_S: float64 (S), above 0: load that a server works off in a unit of time.
        current_LSE: What the servers hold now; None where nothing is known.
    """

    load_LE: Float
    slots_LS: Int
    speeds_S: Float
    current_LSE: Holds | None = None

    @property
    def layers(self) -> int:
        """L."""
        return int(self.load_LE.shape[0])

    @property
    def experts(self) -> int:
        """E."""
        return int(self.load_LE.shape[1])

    @property
    def servers(self) -> int:
        """S."""
        return int(self.slots_LS.shape[1])


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout, how good it is, and how to get there.

    Attributes:
        policy: Name of the policy that made it.
        holds_LSE: bool (L, S, E).
        shares_LSE: float64 (L, S, E); 0 where not held; over S they sum to 1 for each expert.
        par_L: float64 (L): highest load / speed of a server over total load / total speed; 1.0
            for a layer without load.
        bound_L: float64 (L): no plan with these slots has a lower PAR.
        transit: Replicas held in this plan and not now; 0 if `current` was not given.
        problem: The question that it answers.
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
        """float64 (L): par / bound; 1.0 is proven to be the best."""
        return self.par_L / self.bound_L

    @property
    def gap(self) -> Float:
        """The same as `gap_L`."""
        return self.gap_L

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The way from `current`, in a safe order (see `ordered_moves`); empty without `current`."""
        current_LSE = self.problem.current_LSE
        if current_LSE is None:
            return ()
        return ordered_moves(current_LSE, self.holds_LSE, self.problem.slots_LS)


def make_plan(policy: str, problem: Problem, holds_LSE: Holds, shares_LSE: Shares) -> Plan:
    """Measures a layout. Time O(L * S * E)."""
    from balancer.policies.bounds import par_bound
    from balancer.policies.measure import par

    current_LSE = problem.current_LSE
    transit = 0
    if current_LSE is not None:
        transit = int(np.count_nonzero(holds_LSE > current_LSE))
    par_L = par(problem.load_LE, holds_LSE, shares_LSE, problem.speeds_S)
    bound_L = par_bound(problem)
    # A best plan is at the bound; sums in another order end a few units in the last place below it.
    rounded_L = (par_L < bound_L) & (par_L > bound_L * (1 - 1e-12))
    return Plan(
        policy=policy,
        holds_LSE=holds_LSE,
        shares_LSE=shares_LSE,
        par_L=np.where(rounded_L, bound_L, par_L),
        bound_L=bound_L,
        transit=transit,
        problem=problem,
    )
