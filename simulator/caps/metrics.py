"""Latency, throughput and imbalance of a simulated run, and confidence intervals over several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from simulator.caps.cost import CostModel
from simulator.caps.engine import Run

__all__ = ["figures", "half_width_95"]

# Student's t, 97.5 %, by degrees of freedom. Beyond the table the normal distribution is close enough.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
_NORMAL = 1.96


def figures(run: Run, cost: CostModel, warm_up: float) -> dict[str, float]:
    """Compute the figures of a run, which strategies are compared by.

    Args:
        cost: The run's execution model.
        warm_up: Share of the first requests, whose latencies are left out.

    Returns:
        `p50`, `p90` and `p99` of the latency in milliseconds; `throughput`, finished requests per second from
        the first arrival to the last end; `imbalance` of the cost model, mean over batches.
    """
    counted_s = run.latency_s[int(warm_up * len(run.latency_s)) :]
    p50, p90, p99 = (1e3 * np.percentile(counted_s, (50, 90, 99))).tolist()
    first_s = float((run.finish_s - run.latency_s).min())
    throughput = len(run.finish_s) / (float(run.finish_s.max()) - first_s)
    imbalance = float(np.mean([cost.imbalance(load_E) for load_E in run.batch_load_BE]))
    return {"p50": p50, "p90": p90, "p99": p99, "throughput": throughput, "imbalance": imbalance}


def half_width_95(values: Sequence[float]) -> float | None:
    """Return half of the 95 % confidence interval of the mean (Student's t); None for one value."""
    count = len(values)
    if count < 2:
        return None
    t = _T[count - 2] if count - 2 < len(_T) else _NORMAL
    return t * float(np.std(values, ddof=1)) / math.sqrt(count)
