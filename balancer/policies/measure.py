"""Loads of servers under a layout."""

from __future__ import annotations

import numpy as np

from balancer.policies import _planning
from balancer.policies.types import Float, Holds, Shares

__all__ = ["par", "server_load"]


def server_load(load_LE: Float, holds_LSE: Holds, shares_LSE: Shares) -> Float:
    """float64 (L, S): what each server gets of each layer. Time O(L * S * E / 8)."""
    load_LS = np.empty(holds_LSE.shape[:2])
    _planning.server_load(load_LE, holds_LSE, shares_LSE, *holds_LSE.shape, load_LS)
    return load_LS


def par(load_LE: Float, holds_LSE: Holds, shares_LSE: Shares, speeds_S: Float) -> Float:
    """float64 (L): highest load / speed over total load / total speed; 1.0 without load."""
    load_LS = server_load(load_LE, holds_LSE, shares_LSE)
    mean_L = load_LE.sum(axis=1) / speeds_S.sum()
    peak_L: Float = (load_LS / speeds_S).max(axis=1)
    par_L: Float = np.divide(peak_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    return par_L
