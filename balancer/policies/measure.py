"""Loads of servers under a layout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.types import Float, Holds, Shares

__all__ = ["par", "server_load"]


def server_load(load_LE: Float, shares_LSE: Shares) -> Float:
    """float64 (L, S): what each server gets of each layer."""
    return np.matvec(shares_LSE, load_LE)


def par(load_LE: Float, holds_LSE: Holds, shares_LSE: Shares, speeds_S: Float) -> Float:
    """float64 (L): highest load / speed over total load / total speed; 1.0 without load."""
    load_LS = server_load(load_LE, shares_LSE)
    mean_L = load_LE.sum(axis=1) / speeds_S.sum()
    peak_L = (load_LS / speeds_S).max(axis=1)
    return np.divide(peak_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
