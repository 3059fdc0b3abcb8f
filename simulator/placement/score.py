"""Modelled time and score of a replay by LauzHack's and Huawei's dynamic-balancing competition.

    time   60 s of balanced compute x mean PAR + transit x 88,080,384 bytes / 900 GB/s
    score  100 x time of EPLB re-planned every 1,024 iterations / time

The bytes are those of one of DeepSeek-R1's experts in bfloat16.
"""

from __future__ import annotations

from balancer.policies.prices import EXPERT_BYTES, LINK_BYTES_PER_S

__all__ = ["BASELINE_INTERVAL", "BASELINE_POLICY", "modelled_time", "score"]

BALANCED_S = 60.0
BASELINE_POLICY, BASELINE_INTERVAL = "eplb", 1024


def modelled_time(mean_par: float, transit: int) -> float:
    """Return the modelled time of a replay in seconds: computing grows with PAR, loading with transit."""
    return BALANCED_S * mean_par + transit * EXPERT_BYTES / LINK_BYTES_PER_S


def score(time_s: float, baseline_s: float) -> float:
    """Return the score of a modelled time: 100 equals the baseline; more is better."""
    return 100.0 * baseline_s / time_s
