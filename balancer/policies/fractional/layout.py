"""The policy `fractional`: place for the split.

A client may give a batch's tokens of one expert to its replicas in any proportion. So what matters of a
placement is not the load per replica but what the best split over it comes to (`balancer.policies.split`).

    piece   what a server takes of an expert that others hold, too
    PAR     of the best split
    price   by how much a replica that is loaded must lower the PAR of its layer
    abroad  replicas of an expert in further nodes than its first

From nothing (`fill.c`), as one fills an alias table (A. J. Walker 1974; McNaughton's wrap-around rule, 1959,
with room for k jobs on a machine):

    Step 1. A server with k slots is filled to exactly its part of the load: k - 1 whole experts, and a
            piece of one more, the hottest that is left where that is possible. What remains of that one
            stays in the pool. This always works while the pool has as many experts as the servers that
            are left have slots, less one each: PAR is 1 then, with at most E + S - 1 replicas.
    Step 2. With fewer slots: replicas where load per replica is highest (Adams' apportionment), longest
            processing time first, and step 4.
    Step 3. Slots that are left get further replicas of the hottest experts.

From what is held now (`improve.c`):

    Step 4. The best split of each scenario by a max-flow. Above an aim between mean and peak, what cannot be
            shifted is excess; it sits on servers whose experts nobody else holds. One more replica of such an
            expert, on a server with room, in the place of a replica that can be spared, as long as there is
            excess; where there is no such place, two experts change places.
    Step 5. If that lowered the mean PAR by more than the loads are worth, it stands, with a lower aim next;
            else nothing of it, and an aim nearer to the peak is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies.fractional import _fractional
from balancer.policies.fractional.forecast import block_means, forecast, scenarios
from balancer.policies.problem import checked_window
from balancer.policies.types import Float, Layout, Problem

__all__ = [
    "EXPERT_BYTES",
    "LINK_BYTES_PER_S",
    "SCENARIOS",
    "checked_nodes",
    "fractional",
    "lay_out",
]

EXPERT_BYTES = 88_080_384
"""DeepSeek-R1's in bfloat16."""

LINK_BYTES_PER_S = 9e11

SCENARIOS = 6
"""Loads that a plan for a window is made for at once."""


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
    """Place for the split of each batch; see the module for the algorithm.

    The shares are those of the best split of the load that is planned for: PAR 1.0 from nothing wherever
    (slots per server - 1) * servers >= experts and servers are alike. Every replica has one above 0.

    Args:
        problem: What to plan. With `current`, only moves that pay are made.
        window_WLE: (W, L, E) loads by iteration, oldest first. With it the plan is made for what they
            are forecast to be in as long a time to come, noise included, instead of for the problem's load.
        expert_bytes: Of one expert of one layer.
        link_bytes_per_s: At which a server loads experts.
        stall_s: Seconds of service that a load costs beside its bytes.
        horizon_s: Seconds of service at PAR 1 in which a load must have paid back its cost. Layers are
            assumed to take equal parts of it.
        least_gain: A load must lower the PAR of its layer by that in any case; 0 by default, and 0.002 for
            a window: what is less than that may be the noise's.
        nodes_S: (S,) the node of each server, from 0.
        cross_node_replicas: Replicas per layer that experts may have abroad; any number by default.

    Returns:
        holds_LSE, shares_LSE.

    Raises:
        ValueError: A knob is out of its range; the message names it.

    Time from nothing O(L * S * (E + slots)); from `current` O(moves * (slots + E)) beside the flows, each
    O(slots) to O(slots * S), for each scenario.
    """
    if least_gain is None:
        least_gain = 0.0 if window_WLE is None else 0.002
    price = checked_price(expert_bytes, link_bytes_per_s, stall_s, horizon_s, least_gain)
    load_BLE = problem.load_LE[None]
    if window_WLE is not None:
        window_WLE = checked_window("window_WLE", window_WLE, (problem.layers, problem.experts))
        blocks_NLE = block_means(window_WLE)
        said_BLE = forecast(blocks_NLE, len(blocks_NLE), SCENARIOS)
        load_BLE = scenarios(window_WLE, blocks_NLE, said_BLE)
    return lay_out(
        problem,
        load_BLE,
        price(problem.layers),
        *checked_nodes(nodes_S, cross_node_replicas, problem.servers),
    )


def lay_out(
    problem: Problem,
    load_BLE: Float,
    price: float,
    nodes_S: npt.NDArray[np.int32] | None,
    most_abroad: int,
) -> Layout:
    """A layout for several loads at once.

    Args:
        problem: All but the load.
        load_BLE: float64 (B, L, E) scenarios.
        price: See the module; without `current` there is none.
        nodes_S, most_abroad: From `checked_nodes`.
    """
    shape = (problem.layers, problem.servers, problem.experts)
    holds_LSE = np.zeros(shape, np.bool_)
    shares_LSE = np.zeros(shape)
    _fractional.plan(
        np.ascontiguousarray(load_BLE),
        len(load_BLE),
        *shape,
        problem.slots_LS,
        problem.speeds_S,
        problem.current_LSE,
        nodes_S,
        most_abroad,
        0.0 if problem.current_LSE is None else price,
        holds_LSE,
        shares_LSE,
    )
    return holds_LSE, shares_LSE


def checked_price(
    expert_bytes: float,
    link_bytes_per_s: float,
    stall_s: float,
    horizon_s: float,
    least_gain: float,
) -> Callable[[int], float]:
    """What a load must lower its layer's PAR by, from the number of layers. Raises ValueError."""
    for name, value in (
        ("expert_bytes", expert_bytes),
        ("stall_s", stall_s),
        ("least_gain", least_gain),
    ):
        if not 0 <= value < np.inf:
            raise ValueError(f"{name} is {value}, must be finite and at least 0")
    for name, value in (("link_bytes_per_s", link_bytes_per_s), ("horizon_s", horizon_s)):
        if not value > 0:
            raise ValueError(f"{name} is {value}, must be above 0")
    part = (expert_bytes / link_bytes_per_s + stall_s) / horizon_s
    return lambda layers: max(least_gain, part * layers)


def checked_nodes(
    nodes_S: npt.ArrayLike | None, cross_node_replicas: int | None, servers: int
) -> tuple[npt.NDArray[np.int32] | None, int]:
    """Nodes and limit; no nodes where there is no limit. Raises ValueError."""
    if cross_node_replicas is None:
        return None, 0
    if cross_node_replicas < 0:
        raise ValueError(f"cross_node_replicas is {cross_node_replicas}, must be at least 0")
    if nodes_S is None:
        raise ValueError("nodes_S: cross_node_replicas needs the node of each server")
    nodes = np.asarray(nodes_S)
    if nodes.shape != (servers,) or not np.issubdtype(nodes.dtype, np.integer) or nodes.min() < 0:
        raise ValueError(f"nodes_S must be {servers} whole numbers of at least 0")
    # Numbered without gaps: their count is what the planning goes through.
    return np.unique(nodes, return_inverse=True)[1].astype(np.int32), int(cross_node_replicas)
