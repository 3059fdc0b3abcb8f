"""How good a plan can be at all: proven lower bounds of the PAR.

    any placement     what the servers can take with their slots, and the hottest experts: with M as the
                      highest load a server may have, an expert needs ceil(load / M) replicas, and all of them
                      must have a slot
    this placement    the best split over it, by max-flow
    any sequence      a clairvoyant that knows every iteration's loads before it, and moves replicas for
                      nothing
Shape suffixes: I iterations, L layers, S servers, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.compact import replicate
from balancer.policies.measure import over_mean
from balancer.policies.problem import checked_load, make_problem, refuse_token_ids
from balancer.policies.split import levels
from balancer.policies.types import Float, Problem

_ROUNDING = 1e-12

__all__ = ["clairvoyant_bound", "par_bound", "split_bound"]


def par_bound(problem: Problem) -> Float:
    """float64 (L): no plan with these slots has a lower PAR.

    The higher of two levels over the mean, both at least 1:

    - The level up to which servers must be filled: one with c slots takes the c hottest experts at most, one
      without slots nothing.
    - M, the least with sum over experts of max(1, ceil(load / (M * highest speed))) <= slots. Servers
      without slots count neither for the highest speed nor as places for replicas. Giving each further
      replica to the expert with the highest load per replica finds that M (Adams' apportionment).

    Time O(L * E) where the first level is such an M, as it is wherever there are E + S slots or more, else
    O(L * (E + extra slots) * log E); and O(L * (E log E + S log S)) where slots do not follow the speeds.
    """
    load_LE, slots_LS = problem.load_LE, problem.slots_LS
    usable_LS = slots_LS > 0
    fill_L = _fill(problem)
    # What the fastest server takes of a layer that is filled to that level.
    fastest_L = np.where(usable_LS, problem.speeds_S, 0.0).max(axis=1)
    most_L = load_LE.sum(axis=1) / problem.speeds_S.sum() * fill_L * fastest_L
    parts_LE = np.divide(
        load_LE, most_L[:, None], out=np.ones_like(load_LE), where=most_L[:, None] > 0
    )
    tight_L = np.maximum(np.ceil(parts_LE), 1).sum(axis=1) > problem.slots_L
    over_L = np.ones(problem.layers)
    servers_L = usable_LS.sum(axis=1)
    for servers in np.unique(servers_L[tight_L]).tolist():
        of_N = np.flatnonzero(tight_L & (servers_L == servers))
        load_NE = load_LE[of_N]
        each_NE = load_NE / replicate(load_NE, problem.slots_L[of_N], servers)
        over_L[of_N] = each_NE.max(axis=1) / most_L[of_N]
    return fill_L * np.maximum(over_L, 1.0)


def _fill(problem: Problem) -> Float:
    """float64 (L): over the mean, the least t with sum over servers of min(t * speed, c hottest) = load.

    If some servers take their c hottest experts, then t >= (load - theirs) / (speed of the others). For the
    servers that fill up first, both sides are equal.
    """
    load_LE, slots_LS, speeds_S = problem.load_LE, problem.slots_LS, problem.speeds_S
    fill_L = np.ones(problem.layers)
    # The c hottest of E experts have c / E of the load at least.
    part_LS = speeds_S / speeds_S.sum()
    total_L = load_LE.sum(axis=1)
    of_N = np.flatnonzero((slots_LS < part_LS * problem.experts).any(axis=1) & (total_L > 0))
    if not len(of_N):
        return fill_L
    hottest_NE = np.cumsum(-np.sort(-load_LE[of_N], axis=1), axis=1)
    most_NS = np.take_along_axis(hottest_NE, np.maximum(slots_LS[of_N], 1) - 1, axis=1)
    most_NS[slots_LS[of_N] == 0] = 0.0
    order_NS = np.argsort(most_NS / speeds_S, axis=1)
    full_NS = np.take_along_axis(most_NS, order_NS, axis=1).cumsum(axis=1)
    # Rounded sums must not lift the bound above what a plan can reach.
    rest_NS = total_L[of_N][:, None] - full_NS[:, :-1] * (1 + _ROUNDING)
    speed_NS = speeds_S[order_NS]
    left_NS = speed_NS[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    level_N = (rest_NS / left_NS).max(axis=1, initial=0.0)
    fill_L[of_N] = np.maximum(level_N / (total_L[of_N] / speeds_S.sum()), 1.0)
    return fill_L


def split_bound(
    load_LE: npt.ArrayLike, holds_LSE: npt.NDArray[np.bool_], speeds_S: npt.ArrayLike | None = None
) -> Float:
    """float64 (L): no shares over this placement have a lower PAR, and some have just that.

    Args:
        load_LE: (L, E), finite and at least 0.
        holds_LSE: (L, S, E); each expert has a server.
        speeds_S: (S,) above 0; all 1 by default.

    Raises:
        ValueError: An argument is wrong; the message names it.

    A max-flow per layer (see `split`), exact to 1e-9.
    """
    load = checked_load("load_LE", load_LE, 2)
    layers, servers, experts = holds_LSE.shape
    if load.shape != (layers, experts):
        raise ValueError(f"holds_LSE has shape {holds_LSE.shape}, load_LE {load.shape}")
    if not holds_LSE.any(axis=1).all():
        raise ValueError("holds_LSE leaves an expert without a server")
    speeds = np.ones(servers) if speeds_S is None else np.asarray(speeds_S, dtype=np.float64)
    level_L = np.array([levels(load[i : i + 1], holds_LSE[i], speeds)[0] for i in range(layers)])
    return over_mean(level_L, load.sum(axis=1) / speeds.sum())


def clairvoyant_bound(
    load_ILE: npt.ArrayLike,
    servers: int,
    slots: int | npt.ArrayLike,
    *,
    speeds_S: npt.ArrayLike | None = None,
) -> Float:
    """float64 (I, L): the PAR of each iteration that no sequence of plans can go below.

    That of `par_bound`, as if every iteration had a plan of its own, made for its own loads. Wherever
    (slots per server - 1) * servers >= experts, and servers are alike, there are such plans with PAR 1
    (see `fractional`): it is the optimum then, not only a bound.

    Args:
        load_ILE: (I, L, E), finite and at least 0.
        servers, slots, speeds_S: As for `plan`.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    refuse_token_ids("load_ILE", np.asarray(load_ILE))
    load = checked_load("load_ILE", load_ILE, 3)
    iterations, layers, experts = load.shape
    one = make_problem(load[0], servers, slots, None, speeds_S)
    all_of_them = Problem(
        load.reshape(iterations * layers, experts),
        np.tile(one.slots_LS, (iterations, 1)),
        np.tile(one.asked_LS, (iterations, 1)),
        one.speeds_S,
    )
    return par_bound(all_of_them).reshape(iterations, layers)
