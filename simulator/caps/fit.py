"""Parameters of the simulated workload and cost model that reproduce the table of the CAPS paper.

The paper publishes its results, not its generator: these values are *fitted* to its table of bursty arrivals.
See docs/scheduling.md for the table and the deviations.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from simulator.caps.cost import ImbalanceCost
from simulator.caps.engine import Rules
from simulator.caps.workload import Domains

__all__ = ["BATCH_SIZE", "COST", "DOMAINS", "RULES", "WARM_UP", "WINDOW_SIZE", "parameters"]

# As published: batches of 8 from a window of 32, dispatched at 16 requests or 100 ms, 60 experts, top-4.
BATCH_SIZE = 8
WINDOW_SIZE = 32
RULES = Rules(trigger=16, tick_s=0.1)
# Fitted. Leaving out this share of the first requests also matches p50 and p90 to the paper's.
WARM_UP = 0.1
COST = ImbalanceCost(base_s=0.03815, sensitivity=0.398)
DOMAINS = Domains(
    experts=60,
    domains=20,
    hot=9,
    hot_weight=51.0,
    tokens=100,
    top_k=4,
    burst_mean=28.0,
    burst_speed=1.3,
)


def parameters() -> dict[str, Any]:
    """Return all fitted and published parameters, to be stored with the results of a simulation."""
    return {
        "fitted": True,
        "batch_size": BATCH_SIZE,
        "window_size": WINDOW_SIZE,
        "warm_up": WARM_UP,
        "rules": asdict(RULES),
        "execution": asdict(COST),
        "workload": asdict(DOMAINS),
    }
