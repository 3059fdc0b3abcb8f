"""Loads of servers under a layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies import _planning
from balancer.policies.types import Float, Holds, Int, Shares

__all__ = ["equal_shares", "held_load", "par", "peak_to_mean", "server_load"]


def server_load(load_LE: Float, holds_LSE: Holds, shares_LSE: Shares) -> Float:
    """float64 (L, S): what each server gets of each layer. Time O(L * S * E / 8)."""
    layers, servers, experts = holds_LSE.shape
    load_LS = np.empty((layers, servers))
    _planning.server_load(load_LE, holds_LSE, shares_LSE, layers, servers, experts, load_LS)
    return load_LS


def par(load_LE: Float, holds_LSE: Holds, shares_LSE: Shares, speeds_S: Float) -> Float:
    """float64 (L): highest load / speed over total load / total speed; 1.0 without load."""
    return peak_to_mean(server_load(load_LE, holds_LSE, shares_LSE), speeds_S)


def held_load(
    load_LE: Float, holds_LSE: Holds, slots_LS: Int
) -> tuple[Float, npt.NDArray[np.bool_]]:
    """The same with equal shares for all that hold an expert.

    Returns:
        load_LS: float64 (L, S); loads of experts that nobody holds are lost.
        fits_L: bool (L): each expert is held, and no server holds more than its slots.
    """
    layers, servers, experts = holds_LSE.shape
    load_LS, fits_L = np.empty((layers, servers)), np.empty(layers, dtype=np.bool_)
    _planning.held_load(load_LE, holds_LSE, slots_LS, layers, servers, experts, load_LS, fits_L)
    return load_LS, fits_L


def equal_shares(holds_LSE: Holds) -> Shares:
    """float64 (L, S, E): 1 / (servers that hold the expert) where held."""
    layers, servers, experts = holds_LSE.shape
    shares_LSE = np.zeros(holds_LSE.shape)
    _planning.equal_shares(holds_LSE, layers, servers, experts, shares_LSE)
    return shares_LSE


def peak_to_mean(load_LS: Float, speeds_S: Float) -> Float:
    """float64 (L): PAR of servers' loads; 1.0 without load."""
    mean_L = load_LS.sum(axis=1) / speeds_S.sum()
    peak_L: Float = (load_LS / speeds_S).max(axis=1)
    par_L: Float = np.divide(peak_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    return par_L
