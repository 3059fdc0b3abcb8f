"""Choose the experts of spare slots: one slot a server and layer, beside the placement of a plan.

    spare slot  memory for one more expert of a layer on a server. A plan's placement never counts on it, so
                its replica can be dropped at any time
    scenario    a load that may come. The last loads of a layer are good scenarios: they have its drift and
                its noise from batch to batch
    excess      load above the mean of the servers that the replicas cannot shift, over the mean server load

The idea to follow the load batch by batch with one redundant slot a server is UltraEP's (arXiv 2606.04101),
which knows the exact load and loads experts between router and experts; PROBE's (arXiv 2602.00509) is to
predict it. The algorithm is this project's own:

    Step 1. Split the mean of the scenarios best, by a max-flow. If more than 1 % of it is excess, fill the
            slots that are empty or hardly used, as an alias table is filled: the server with most room takes
            the hottest piece of a server above the mean, which may fall below it and then fills its own slot
            (`refill.c`).
    Step 2. Split each scenario. Servers, those with most room first, exchange their spare replica for the
            expert with which they take most excess, if that is worth a load; repeat while there is excess
            (`exchange.c`).

Shape suffixes: B scenarios, S servers, E experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.problem import checked_load, checked_number
from balancer.policies.sparse import Layout

__all__ = ["LEAST", "SCENARIOS", "choose_spares"]

SCENARIOS = 8
"""Number of last loads to plan for."""

LEAST = 0.05
"""Excess that a loaded replica must take, over the mean server load; less is mostly noise."""

_NONE = -1


def choose_spares(
    load_BE: npt.ArrayLike,
    layout: Layout,
    spare_S: npt.ArrayLike,
    *,
    open_S: npt.ArrayLike | None = None,
    speeds_S: npt.ArrayLike | None = None,
    least: float = LEAST,
) -> npt.NDArray[np.int32]:
    """Choose the expert in each server's spare slot, for one layer.

    Args:
        load_BE: Loads of the experts in each scenario, at least 0; any unit.
        layout: The placement of the layer without spare slots, (1, S, E).
        spare_S: The expert in each spare slot; -1: none.
        open_S: Whether a server may load a replica now; all by default.
        speeds_S: Speeds of the servers; all equal by default.
        least: Excess, as a mean over the scenarios, that each load must take.

    Returns:
        int32 (S): the chosen experts, -1 for none. Servers that are not open keep theirs. A server never has
            an expert that it holds in the layout: such a replica is dropped, as the slot would be wasted.
            The same arguments give the same choice.

    Raises:
        ValueError: An argument is wrong; the message names it.

    Time: about 30 us for each scenario at 64 servers and 256 experts.
    """
    loads = checked_load("load_BE", load_BE, 2)
    if layout.shape[0] != 1 or layout.shape[2] != loads.shape[1]:
        raise ValueError(f"layout has shape {layout.shape}, wanted one layer of load_BE's experts")
    servers, experts = layout.shape[1:]
    spares = np.array(spare_S, np.int32)
    if spares.shape != (servers,) or not ((spares >= _NONE) & (spares < experts)).all():
        raise ValueError(f"spare_S must have an expert or -1 for each of {servers} servers")
    may_load = np.ones(servers, np.bool_) if open_S is None else np.array(open_S, np.bool_)
    speeds = np.ones(servers) if speeds_S is None else np.array(speeds_S, np.float64)
    if may_load.shape != (servers,):
        raise ValueError(f"open_S has shape {may_load.shape}, wanted ({servers},)")
    if speeds.shape != (servers,) or not ((speeds > 0) & (speeds < np.inf)).all():
        raise ValueError(f"speeds_S must be {servers} finite numbers above 0")
    checked_number("least", least)
    compiled.plan_spares(
        loads, layout.first_X, layout.expert_N, speeds, may_load, float(least), spares
    )
    return spares
