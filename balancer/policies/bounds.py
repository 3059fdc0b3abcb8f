"""How good a plan can be at all: proven lower bounds of the PAR.

    any placement     the mean, and the hottest experts: with M as the highest load a server may have, an
                      expert needs ceil(load / M) replicas, and all of them must have a slot
    this placement    the best split over it, by max-flow
    any sequence      a clairvoyant that knows every iteration's loads before it, and moves replicas for
                      nothing
Shape suffixes: I iterations, L layers, S servers, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.compact import replicate, usable_slots
from balancer.policies.problem import checked_load, make_problem
from balancer.policies.split import levels
from balancer.policies.types import Float, Problem

__all__ = ["clairvoyant_bound", "par_bound", "split_bound"]


def par_bound(problem: Problem) -> Float:
    """float64 (L): no plan with these slots has a lower PAR.

    max(1, M / mean), M the least with sum over experts of max(1, ceil(load / (M * highest speed))) <=
    slots, and no expert on more than all servers. Giving each further replica to the expert with the
    highest load per replica finds that M (Adams' apportionment). Time O(L * (E + extra slots) * log E).
    """
    load_LE, speeds_S = problem.load_LE, problem.speeds_S
    slots_L = usable_slots(problem.slots_LS, problem.experts)
    each_LE = load_LE / replicate(load_LE, slots_L, problem.servers)
    mean_L = load_LE.sum(axis=1) / speeds_S.sum()
    bound_L = np.ones(problem.layers)
    np.divide(each_LE.max(axis=1), speeds_S.max() * mean_L, out=bound_L, where=mean_L > 0)
    return np.maximum(bound_L, 1.0)


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
    mean_L = load.sum(axis=1) / speeds.sum()
    par_L: Float = np.divide(level_L, mean_L, out=np.ones(layers), where=mean_L > 0)
    return par_L


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
    load = checked_load("load_ILE", load_ILE, 3)
    iterations, layers, experts = load.shape
    one = make_problem(load[0], servers, slots, None, speeds_S)
    all_of_them = Problem(
        load.reshape(iterations * layers, experts),
        np.tile(one.slots_LS, (iterations, 1)),
        one.speeds_S,
    )
    return par_bound(all_of_them).reshape(iterations, layers)
