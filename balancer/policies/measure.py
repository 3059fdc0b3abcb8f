"""Server loads and PAR of a layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies.replicas import Replicas
from balancer.policies.types import Float, Holds, Shares

__all__ = ["equal_shares", "over_mean", "par", "peak_to_mean"]


def par(load_LE: Float, holds_LSE: Holds, shares_LSE: Shares, speeds_S: Float) -> Float:
    """float64 (L): highest load / speed over total load / total speed; 1.0 without load."""
    return peak_to_mean(Replicas.of(holds_LSE).server_load(load_LE, shares_LSE), speeds_S)


def equal_shares(holds_LSE: Holds) -> Shares:
    """float64 (L, S, E): 1 / (servers that hold the expert) where held."""
    return Replicas.of(holds_LSE).equal_shares()


def peak_to_mean(load_LS: Float, speeds_S: Float) -> Float:
    """float64 (L): PAR of servers' loads; 1.0 without load."""
    return over_mean((load_LS / speeds_S).max(axis=1), load_LS.sum(axis=1) / speeds_S.sum())


def over_mean(
    peak_N: npt.NDArray[np.floating], mean_N: npt.NDArray[np.floating]
) -> npt.NDArray[Any]:
    """PAR: peak / mean in their type; 1.0 without load."""
    par_N: npt.NDArray[Any] = np.divide(peak_N, mean_N, out=np.ones_like(mean_N), where=mean_N > 0)
    return par_N
