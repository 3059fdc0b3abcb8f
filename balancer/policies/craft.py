"""The policy CRAFT: replicas only in the layers where they help (CRAFT, 2026; algorithms of its appendix A).

balancedness   mean / maximum of the servers' loads in a batch, 1 / PAR: 1 is perfect
gain           a layer's balancedness with r replicas, minus that without
R              replication factor: replicas per server, over all layers
capacity       number of a layer's experts on a server
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.compact import place, refine, replicate
from balancer.policies.problem import checked_number, checked_window
from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Int, Problem

__all__ = [
    "Benefit",
    "allocate",
    "automatic_factor",
    "craft",
    "interleave",
    "least_factor",
    "replication_benefit",
]


# Limit for the compiled loop, which ends long before it.
_MOST_EXCHANGES = 1 << 62
# The paper's best R, on 48 to 96 GPUs.
_PAPER_FACTOR = 8
# PAR of a layer that needs no further replicas, and one as good as the best (`least_factor`).
_BALANCED, _NEAR_BEST = 1.25, 1.01


def craft(
    problem: Problem,
    *,
    window_WLE: npt.NDArray[np.number] | None = None,
    replication_factor: int | Literal["auto"] | None = None,
    printed: bool = False,
    refinement: int = 1,
) -> Layout:
    """Lay out: estimate gains by replay, allot replicas to layers, spread them over servers, pack.

    The problem's slots are a ceiling: a layer gets only replicas that gain most within a budget of R * S
    replicas over all layers. `current` is ignored. All replicas of an expert have equal shares.

    Args:
        problem: What to plan. Speeds count in the packing, not in the estimate.
        window_WLE: (W, L, E) loads by batch, to replay; by default the load is one batch.
        replication_factor: R; by default 8, the paper's best, or more if the load needs it (`least_factor`);
            "auto": see `automatic_factor`.
        printed: Allot exactly as Algorithm 2 is printed; see `allocate`.
        refinement: Exchanges per server and layer after the paper's greedy placement (`compact.refine`): with
            few free slots, greedy is limited by the last ones. 0: the paper's placement.

    Raises:
        ValueError: A knob is out of its range; the message names it.

    Time O(K * L * (E + P) * (log S + W / 16) + L * R * S * K) with K = 1 + log2 S replica counts.
    """
    if replication_factor is not None and replication_factor != "auto":
        checked_number("replication_factor", replication_factor, whole=True)
    if not isinstance(printed, (bool, np.bool_)):
        raise ValueError(f"printed is {printed!r}, must be true or false")
    checked_number("refinement", refinement, whole=True)
    servers, experts = problem.servers, problem.experts
    if window_WLE is None:
        window_WLE = problem.load_LE[None]
    else:
        window_WLE = checked_window("window_WLE", window_WLE, (problem.layers, experts))
    # Steps 1 and 2: gains, and the budget.
    benefit = replication_benefit(problem, window_WLE)
    if replication_factor is None:
        replication_factor = least_factor(benefit, servers)
    elif replication_factor == "auto":
        replication_factor = automatic_factor(benefit, servers)
    # Step 3: replicas of each layer.
    extra_L = allocate(benefit, replication_factor * servers, printed=printed)
    # Step 4: capacities, level over servers within and across layers.
    capacity_LS = interleave(experts + extra_L, problem.slots_LS)
    # Step 5: greedy placement within those.
    count_LE = replicate(problem.load_LE, experts + extra_L, servers)
    placed = place(problem.load_LE, count_LE, capacity_LS, problem.speeds_S)
    # Step 6, not in the paper.
    budget = min(refinement * servers, _MOST_EXCHANGES)
    return refine(placed, problem.load_LE, problem.speeds_S, budget).layout()


@dataclass(frozen=True, eq=False)
class Benefit:
    """Gains in balancedness from replicas, by layer.

    Attributes:
        replicas_K: int64 (K), ascending: the replica counts tried, 1, 2, 4, ... up to S, and
            all slots' if servers are more than experts.
        gain_KL: float64 (K, L): balancedness with these replicas minus that without, mean over batches.
        limit_L: int64 (L): most replicas that the layer's slots allow.
        par_KL: float64 (K + 1, L): PAR of the planned load without replicas, then with these; None: unknown.
    """

    replicas_K: Int
    gain_KL: Float
    limit_L: Int
    par_KL: Float | None = None


def replication_benefit(problem: Problem, window_BLE: npt.NDArray[np.number]) -> Benefit:
    """Estimate gains by Algorithm 1: place the summed load with each replica count, and replay the batches.

    Counts beyond every layer's slots are not tried; a layer with fewer slots is tried with all of them.

    Args:
        problem: Its load is what the placements are made for.
        window_BLE: (B, L, E) loads by batch.

    Time O(K * L * (E + P) * (log S + B / 16)); batches are replayed in float32.
    """
    layers, experts, servers = problem.layers, problem.experts, problem.servers
    limit_L = problem.slots_L - experts
    most = int(limit_L.max())
    tried = [0, *(1 << k for k in range(servers.bit_length()) if 1 << k <= min(servers, most))]
    if most > servers > experts:
        # The paper's counts presume that each server has an expert without replicas.
        tried.append(most)
    # Replicas are handed out one by one, so the first r of them are those for a count of r.
    width = tried[-1]
    picks_LX = np.empty((layers, width), dtype=np.int64)
    count_LE = np.empty((layers, experts), dtype=np.int64)
    extra_L = np.full(layers, width)
    compiled.replicate(problem.load_LE, extra_L, servers, False, count_LE, picks_LX)
    count_KLE = np.ones((len(tried), layers, experts), dtype=np.int64)
    slots_KLS = np.empty((len(tried), layers, servers), dtype=np.int64)
    layer_L1 = np.arange(layers)[:, None]
    for k, replicas in enumerate(tried):
        if k:
            count_KLE[k] = count_KLE[k - 1]
            used_LX = np.arange(tried[k - 1], replicas) < limit_L[:, None]
            picked_LX = picks_LX[:, tried[k - 1] : replicas]
            np.add.at(count_KLE[k], (layer_L1, picked_LX), used_LX)
        slots_KLS[k] = interleave(experts + np.minimum(replicas, limit_L), problem.slots_LS)
    server_KLP = np.full((len(tried), layers, experts + width), -1, dtype=np.int32)
    compiled.place(problem.load_LE, count_KLE, slots_KLS, problem.speeds_S, False, server_KLP)
    sum_KL = np.zeros((len(tried), layers))
    window = np.ascontiguousarray(window_BLE, dtype=np.float32)
    compiled.replay(window, count_KLE, server_KLP, servers, sum_KL)
    balancedness_KL = sum_KL / len(window)
    whole_KL = np.zeros_like(sum_KL)
    planned = problem.load_LE[None].astype(np.float32)
    compiled.replay(planned, count_KLE, server_KLP, servers, whole_KL)
    return Benefit(
        replicas_K=np.array(tried[1:], dtype=np.int64),
        gain_KL=balancedness_KL[1:] - balancedness_KL[0],
        limit_L=limit_L,
        par_KL=1 / whole_KL,
    )


def allocate(benefit: Benefit, budget: int, *, printed: bool = False) -> Int:
    """Algorithm 2: int64 (L), replicas of each layer, `budget` over all at most.

    A multiple-choice knapsack by dynamic programming finds the greatest sum of gains; of equal sums, it takes
    the one with fewer replicas in the later layers. As printed in the paper, the algorithm adds r * T[r]
    instead of T[r], which favours layers that take many replicas over those that gain from few: with gains of
    0.5 by 1 replica and 0.3 by 4 in two layers and a budget of 4, it takes the 4 (1.2 against 0.5). `printed`
    selects that variant.

    Time O(L * budget * K).
    """
    gain_LK = benefit.gain_KL.T
    if printed:
        gain_LK = gain_LK * benefit.replicas_K
    chosen_L = np.zeros(len(gain_LK), dtype=np.int64)
    # All layers together cannot take more than this.
    budget = min(budget, int(benefit.limit_L.sum()))
    gain_LK = np.ascontiguousarray(gain_LK)
    compiled.allocate(gain_LK, benefit.replicas_K, benefit.limit_L, budget, chosen_L)
    return chosen_L


def least_factor(benefit: Benefit, servers: int) -> int:
    """Choose the least R, 8 at least, whose budget gives each layer what balances it.

    That is the least of the tried counts with which the planned load's PAR is at most 5/4, or, where no
    count is enough, the least that is within 1 % of the best. With several experts per server, few of them
    are above a server's mean load, and the paper's R = 8 has replicas for them. With about one expert per
    server, a layer needs a number of replicas in proportion to the servers, while 8 of them per server are
    spread over all layers: a fixed R then leaves hot experts without a second server.
    """
    if benefit.par_KL is None or not benefit.replicas_K.size:
        return _PAPER_FACTOR
    enough_L = np.maximum(_BALANCED, benefit.par_KL.min(axis=0) * _NEAR_BEST)
    need_L = np.append(0, benefit.replicas_K)[(benefit.par_KL <= enough_L).argmax(axis=0)]
    budget = int(np.minimum(need_L, benefit.limit_L).sum())
    return max(_PAPER_FACTOR, -(-budget // servers))


def automatic_factor(benefit: Benefit, servers: int) -> int:
    """Choose R of 1, 2, 4, ... with the highest gain per replica (section 4.2.1, step 2).

    Gains diminish, so this is usually the smallest R. It shows where replicas are used best, not how many are
    worth their memory.
    """
    best, factor = 0.0, 0
    candidate = 1
    most = int(benefit.limit_L.sum())
    while benefit.replicas_K.size and (candidate - 1) * servers < most:
        extra_L = allocate(benefit, candidate * servers)
        used = int(extra_L.sum())
        gain = gain_of(benefit, extra_L)
        if used and gain / used > best * (1 + 1e-12):
            best, factor = gain / used, candidate
        candidate *= 2
    return factor


def gain_of(benefit: Benefit, extra_L: Int) -> float:
    """Sum the layers' gains with these replica counts, each 0 or one of those tried."""
    layers = np.flatnonzero(extra_L)
    at_N = np.searchsorted(benefit.replicas_K, extra_L[layers])
    return float(benefit.gain_KL[at_N, layers].sum())


def interleave(total_L: Int, slots_LS: Int) -> Int:
    """Algorithm 3: int64 (L, S), the number of a layer's replicas on each server.

    Servers differ by at most 1 within a layer and over all layers; those with one more are evenly spaced.
    Servers with fewer slots are filled.

    Args:
        total_L: int64 (L): replicas, including each expert's first.
        slots_LS: int64 (L, S): slots; at least total_L in each layer.

    Time O(L * S * (1 + total / S)).
    """
    assigned_LS = np.empty_like(slots_LS)
    total_L, slots_LS = np.ascontiguousarray(total_L), np.ascontiguousarray(slots_LS)
    compiled.interleave(total_L, slots_LS, assigned_LS)
    return assigned_LS
