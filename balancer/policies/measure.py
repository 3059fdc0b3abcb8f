"""Measures a layout under a load, for policies and live plans: server loads and PAR."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.types import Float, Holds, Int, Shares

__all__ = ["equal_shares", "held_load", "over_mean", "par", "peak_to_mean", "server_load"]


def server_load(load_LE: Float, holds_LSE: Holds, shares_LSE: Shares) -> Float:
    """float64 (L, S): each server's load in each layer, under the given shares. Time O(L * S * E / 8)."""
    load_LS = np.empty(holds_LSE.shape[:2])
    compiled.server_load(load_LE, holds_LSE, shares_LSE, load_LS)
    return load_LS


def par(load_LE: Float, holds_LSE: Holds, shares_LSE: Shares, speeds_S: Float) -> Float:
    """float64 (L): highest load / speed over total load / total speed; 1.0 without load."""
    return peak_to_mean(server_load(load_LE, holds_LSE, shares_LSE), speeds_S)


def held_load(
    load_LE: Float, holds_LSE: Holds, slots_LS: Int
) -> tuple[Float, npt.NDArray[np.bool_]]:
    """Compute server loads with equal shares for all holders of an expert, to rate ScalpeLB's layouts.

    Returns:
        load_LS: float64 (L, S); without the loads of experts that no server holds.
        fits_L: bool (L): each expert is held, and no server holds more than its slots.
    """
    load_LS, fits_L = np.empty(slots_LS.shape), np.empty(len(slots_LS), dtype=np.bool_)
    compiled.held_load(load_LE, holds_LSE, slots_LS, load_LS, fits_L)
    return load_LS, fits_L


def equal_shares(holds_LSE: Holds) -> Shares:
    """float64 (L, S, E): 1/n for each of an expert's n replicas, else 0. For policies' layouts."""
    shares_LSE = np.zeros(holds_LSE.shape)
    compiled.equal_shares(holds_LSE, shares_LSE)
    return shares_LSE


def peak_to_mean(load_LS: Float, speeds_S: Float) -> Float:
    """float64 (L): PAR of servers' loads, each divided by its server's speed; 1.0 without load."""
    return over_mean((load_LS / speeds_S).max(axis=1), load_LS.sum(axis=1) / speeds_S.sum())


def over_mean(
    peak_N: npt.NDArray[np.floating], mean_N: npt.NDArray[np.floating]
) -> npt.NDArray[Any]:
    """PAR from peak and mean loads, in their type (for the simulator too): peak / mean; 1.0 without load."""
    par_N: npt.NDArray[Any] = np.divide(peak_N, mean_N, out=np.ones_like(mean_N), where=mean_N > 0)
    return par_N
