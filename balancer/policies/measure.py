"""Measures a layout under a load, for policies, live plans and the simulator: PAR."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Holds

__all__ = ["over_mean", "par", "peak_to_mean"]


def par(
    load_LE: Float, holds_LSE: Holds, shares_LSE: npt.NDArray[np.floating], speeds_S: Float
) -> Float:
    """float64 (L): highest load / speed over total load / total speed; 1.0 without load."""
    layout = Layout.of(holds_LSE, shares_LSE)
    return peak_to_mean(layout.server_load(np.ascontiguousarray(load_LE)), speeds_S)


def peak_to_mean(load_LS: Float, speeds_S: Float) -> Float:
    """float64 (L): PAR of servers' loads, each divided by its server's speed; 1.0 without load."""
    return over_mean((load_LS / speeds_S).max(axis=1), load_LS.sum(axis=1) / speeds_S.sum())


def over_mean(
    peak_N: npt.NDArray[np.floating], mean_N: npt.NDArray[np.floating]
) -> npt.NDArray[Any]:
    """PAR from peak and mean loads, in their type (for the simulator too): peak / mean; 1.0 without load."""
    par_N: npt.NDArray[Any] = np.divide(peak_N, mean_N, out=np.ones_like(mean_N), where=mean_N > 0)
    return par_N
