"""Modelled time and score, as the dynamic-balancing competition of LauzHack and Huawei counts them.

    time   60 s of balanced compute x mean PAR + transit x 88,080,384 bytes / 900 GB/s
    score  100 x time of EPLB re-planned every 1,024 iterations / time

The expert is DeepSeek-R1's in bfloat16 (3 x 7168 x 2048 x 2 bytes).
"""

from __future__ import annotations

__all__ = [
    "BASELINE_INTERVAL",
    "BASELINE_POLICY",
    "EXPERT_BYTES",
    "modelled_time",
    "score",
]

BALANCED_S = 60.0
EXPERT_BYTES = 88_080_384
BYTES_PER_S = 900e9
BASELINE_POLICY, BASELINE_INTERVAL = "eplb", 1024


def modelled_time(mean_par: float, transit: int) -> float:
    """Seconds."""
    return BALANCED_S * mean_par + transit * EXPERT_BYTES / BYTES_PER_S


def score(time_s: float, baseline_s: float) -> float:
    """100 is as good as the baseline; more is better."""
    return 100.0 * baseline_s / time_s
