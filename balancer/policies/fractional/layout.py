"""The policy `fractional`: places experts for the best split of each batch.

A client may split a batch's tokens of one expert over its replicas in any proportion. A placement is
therefore rated by the best split over it (`eaas.minmax`), not by the load per replica.

    piece       a server's part of an expert that other servers also hold
    PAR         that of the best split
    price       by how much a loaded replica must lower the PAR of its layer
    cross-node  replicas of an expert on other nodes than its first

One fill (`fill.c`) deals the load out, with and without a current layout. It resembles filling an alias
table (A. J. Walker 1974; McNaughton's wrap-around rule, 1959, with k jobs on a machine): a server with k
slots gets exactly its part of the load, as k - 1 whole experts and a piece of one more. The remainder of
that expert stays in the pool. This always works while the pool has at most one expert more than the
remaining servers have slots, less one each. The PAR is then 1, with at most E + S - 1 replicas.

    Step 1. Leaves: a server that has at most one expert in common with servers not filled yet keeps what it
            holds, as its part of the common expert is determined; then the next server along the chain is a
            leaf. One whose own experts are too much, too little or none is deferred. Without a current
            layout all are.
    Step 2. The pool is dealt to the deferred servers: to each as many of its own experts as possible, else
            the hottest expert left as the piece. Servers that hold too much come first; where nothing is
            held, the server whose slots fit the pool best. With nodes, the pool is dealt to them like to
            servers, within the limit of cross-node replicas, and a node's part to its servers.
    Step 3. A current layout is replaced only if no split over it reaches the new PAR, plus the price of the
            loads. Without one, remaining slots get further replicas of the hottest experts
            (`one_by_one.c`).

With fewer slots there is no such deal: replicate where load per replica is highest (Adams' apportionment),
place by longest processing time first, and continue with step 4. A current layout goes straight to step 4
with several scenarios, or with nodes.

From any layout (`improve.c`):

    Step 4. Split each scenario best, by a max-flow. Load above a target between mean and peak that cannot be
            shifted is excess; it is on servers with sole replicas. While there is excess, add a replica of
            such an expert on a server with capacity, in place of a spare replica; if there is none, exchange
            two experts.
    Step 5. Keep the result if it lowered the mean PAR by more than the loads are worth, and try a lower
            target; else undo it and try a target nearer to the peak.

With a window, a layer whose experts' loads move together again and again (`together.py`) is not planned for
the forecast, but for all iterations of the window at once (`together.c`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.fractional.forecast import forecast, scenarios
from balancer.policies.fractional.together import (
    GAIN_PART,
    Bool,
    anew_factor,
    returns,
)
from balancer.policies.fractional.window import Means, Windows
from balancer.policies.prices import EXPERT_BYTES, LINK_BYTES_PER_S
from balancer.policies.problem import checked_number, checked_window
from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Problem
from eaas.cores import usable_cores

__all__ = ["Price", "checked_nodes", "checked_price", "fractional", "lay_out", "lay_out_next"]

SCENARIOS = 6
"""Number of forecast loads that a plan for a window considers."""

# With more slots over all layers, a plan for a window must not cost a max-flow for every few loads, nor a
# search over all iterations, which takes seconds. One load of many relieves little, so that it counts less.
_LARGE, _LARGE_GAIN_PART = 1 << 17, 0.25

# A thread takes some layers at a time, because not all take equally long.
_CHUNK = 4
_MOST_THREADS = 8


class Price(Protocol):
    """By how much a loaded replica must lower the PAR of its layer."""

    def __call__(self, layers: int, gain_part: float = 1.0) -> float:
        """Return the price for a number of layers, with a part of the least gain."""
        ...


def fractional(
    problem: Problem,
    *,
    window_WLE: npt.NDArray[Any] | None = None,
    expert_bytes: float = EXPERT_BYTES,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    stall_s: float = 0.0,
    horizon_s: float = 60.0,
    least_gain: float | None = None,
    nodes_S: npt.ArrayLike | None = None,
    cross_node_replicas: int | None = None,
) -> Layout:
    """Lay out for the best split of each batch; the module's docstring has the algorithm.

    The shares are those of the best split of the planned load. Without a current layout the PAR is 1.0 if
    servers are alike and (slots per server - 1) * servers >= experts - 1. Every replica has a share above 0.

    Args:
        problem: The input. With `current`, only moves that pay back are made.
        window_WLE: (W, L, E) loads by iteration, oldest first. The plan is then for the forecast of the next
            window, noise included, instead of for the problem's load.
        expert_bytes: Bytes of one expert of one layer.
        link_bytes_per_s: Rate at which a server loads experts.
        stall_s: Seconds of service that a load costs in addition to its bytes.
        horizon_s: Seconds of service at PAR 1 in which a load must pay back. Layers take equal parts of it.
        least_gain: Least fall of a layer's PAR for a load; by default 0, or 0.002 with a window, as smaller
            gains may be noise.
        nodes_S: (S,) the node of each server, from 0.
        cross_node_replicas: Most cross-node replicas per layer; any number by default.

    Raises:
        ValueError: A knob is out of its range; the message names it.

    Time without `current` O(L * S * (E + slots)); with it O(moves * (slots + E)) plus the flows, each
    O(slots) to O(slots * S), for each scenario.
    """
    if least_gain is None:
        least_gain = 0.0 if window_WLE is None else 0.002
    price = checked_price(expert_bytes, link_bytes_per_s, stall_s, horizon_s, least_gain)
    nodes = checked_nodes(nodes_S, cross_node_replicas, problem.servers)
    if window_WLE is None:
        scenarios_BLE = problem.load_LE[None]
        return lay_out(problem, price(problem.layers), *nodes, scenarios_BLE=scenarios_BLE)
    windows = Windows()
    windows.add(checked_window("window_WLE", window_WLE, (problem.layers, problem.experts)))
    return lay_out_next(problem, windows, price, *nodes, threads=0)[0]


def lay_out_next(
    problem: Problem,
    windows: Windows,
    price: Price,
    nodes_S: npt.NDArray[np.int32] | None,
    most_cross_node: int,
    *,
    threads: int = 1,
) -> tuple[Layout, Float]:
    """Compute a layout for the window after the known ones, each layer in the way that suits its loads.

    Args:
        problem: All inputs but the load.
        windows: At least one.
        price: See the module's docstring; unused without `current`.
        nodes_S, most_cross_node: Result of `checked_nodes`.
        threads: Number of threads; 0: one for each usable core.

    Returns:
        The layout, and float64 (L, E) the mean load that it is for.
    """
    window_WLE, blocks_NLE, ahead = windows.last_WLE, windows.blocks_NLE, windows.ahead
    large = int(problem.slots_LS.sum()) > _LARGE
    together_L = returns(blocks_NLE, windows.noise_LE, len(window_WLE) / ahead)
    if nodes_S is not None or large:
        together_L[:] = False
    load_LE = np.empty(problem.load_LE.shape)
    made: dict[bool, Layout] = {}
    if together_L.any():
        load_LTE = windows.means_LTE[together_L]
        load_LE[together_L] = load_LTE.mean(axis=1, dtype=np.float64)
        made[True] = lay_out(
            _part(problem, together_L),
            price(problem.layers, GAIN_PART),
            load_LTE=load_LTE,
            anew=anew_factor(len(window_WLE)),
            threads=threads,
        )
    if not together_L.all():
        rest_WLE = window_WLE[:, ~together_L] if together_L.any() else window_WLE
        rest_NLE = blocks_NLE[:, ~together_L]
        said_BLE = forecast(rest_NLE, ahead, 1 if large else SCENARIOS)
        load_LE[~together_L] = said_BLE.mean(axis=0)
        made[False] = lay_out(
            _part(problem, ~together_L),
            price(problem.layers, _LARGE_GAIN_PART if large else 1.0),
            nodes_S,
            most_cross_node,
            scenarios_BLE=scenarios(rest_WLE, rest_NLE[-ahead:], said_BLE),
            threads=threads,
        )
    # How many layers of the same kind are before each.
    before_L = np.where(together_L, np.cumsum(together_L), np.cumsum(~together_L)) - 1
    return Layout.joined(
        [
            made[kind].part(at, at + 1)
            for kind, at in zip(together_L.tolist(), before_L.tolist(), strict=True)
        ]
    ), load_LE


def _part(problem: Problem, which_L: Bool) -> Problem:
    """Return the problem of some layers."""
    if which_L.all():
        return problem
    current = problem.current
    if current is not None:
        current = Layout.joined(
            [current.part(at, at + 1) for at in np.flatnonzero(which_L).tolist()]
        )
    return replace(
        problem,
        load_LE=problem.load_LE[which_L],
        slots_LS=problem.slots_LS[which_L],
        asked_LS=problem.asked_LS[which_L],
        current=current,
    )


def lay_out(
    problem: Problem,
    price: float,
    nodes_S: npt.NDArray[np.int32] | None = None,
    most_cross_node: int = 0,
    *,
    scenarios_BLE: Float | None = None,
    load_LTE: Means | None = None,
    anew: float = 1.0,
    threads: int = 1,
) -> Layout:
    """Compute one layout for several loads together: scenarios, or iterations that move together.

    Args:
        problem: All inputs but the load.
        price: By how much a loaded replica must lower the PAR (the objective of `together.c`); unused
            without `current`.
        nodes_S, most_cross_node: Result of `checked_nodes`; iterations have none.
        scenarios_BLE: (B, L, E); the layout lowers the mean of their PARs.
        load_LTE: (L, T, E) in place of scenarios; the shares are the best for all iterations, too.
        anew: See `anew_factor`.
        threads: Number of threads; 0: one for each usable core.

    Returns:
        The layout, which does not depend on the number of threads.
    """
    threads = min(threads or usable_cores(), -(-problem.layers // _CHUNK), _MOST_THREADS)

    def work(begin: int, end: int) -> Layout:
        slots_LS = problem.slots_LS[begin:end]
        shape = (end - begin, problem.servers, problem.experts)
        filled = Layout.empty(shape, int(slots_LS.sum()))
        known: tuple[object, ...] = (None, None, None)
        if problem.current is not None:
            before = problem.current.part(begin, end)
            share_N = before.share_N if problem.shares_known else None
            known = (before.first_X, before.expert_N, share_N)
        compiled.plan_fractional(
            None if scenarios_BLE is None else np.ascontiguousarray(scenarios_BLE[:, begin:end]),
            None if load_LTE is None else load_LTE[begin:end],
            *(slots_LS, problem.speeds_S, *known, nodes_S, most_cross_node),
            *(0.0 if problem.current is None else price, anew),
            *filled.arrays,
        )
        # Slots may stay free.
        held = int(filled.first_X[-1])
        return Layout(shape, filled.first_X, filled.expert_N[:held], filled.share_N[:held])

    if threads < 2:
        return work(0, problem.layers)
    begins = range(0, problem.layers, _CHUNK)
    ends = [min(begin + _CHUNK, problem.layers) for begin in begins]
    with ThreadPoolExecutor(threads) as pool:
        return Layout.joined(list(pool.map(work, begins, ends)))


def checked_price(
    expert_bytes: float,
    link_bytes_per_s: float,
    stall_s: float,
    horizon_s: float,
    least_gain: float,
) -> Price:
    """Check the knobs and return the price, which depends on the number of layers. Raises ValueError."""
    for name, value in (
        ("expert_bytes", expert_bytes),
        ("stall_s", stall_s),
        ("least_gain", least_gain),
    ):
        checked_number(name, value)
    for name, value in (("link_bytes_per_s", link_bytes_per_s), ("horizon_s", horizon_s)):
        checked_number(name, value, above=True)
    part = (expert_bytes / link_bytes_per_s + stall_s) / horizon_s

    def price(layers: int, gain_part: float = 1.0) -> float:
        return max(least_gain * gain_part, part * layers)

    return price


def checked_nodes(
    nodes_S: npt.ArrayLike | None, cross_node_replicas: int | None, servers: int
) -> tuple[npt.NDArray[np.int32] | None, int]:
    """Check and return nodes and limit; without a limit no nodes are returned. Raises ValueError."""
    if cross_node_replicas is None:
        return None, 0
    checked_number("cross_node_replicas", cross_node_replicas, whole=True)
    if nodes_S is None:
        raise ValueError("nodes_S: cross_node_replicas needs the node of each server")
    nodes = np.asarray(nodes_S)
    if nodes.shape != (servers,) or not np.issubdtype(nodes.dtype, np.integer) or nodes.min() < 0:
        raise ValueError(f"nodes_S must be {servers} whole numbers of at least 0")
    # Nodes are numbered without gaps, because planning iterates over them.
    return np.unique(nodes, return_inverse=True)[1].astype(np.int32), int(cross_node_replicas)
