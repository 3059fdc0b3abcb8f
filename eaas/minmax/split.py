"""NumPy interface of the C module `_minmax` (semantics: `balancer.policies.split`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eaas.minmax import _minmax

__all__ = ["levels_of", "split_of"]

Float = npt.NDArray[np.float64]


def split_of(
    load_E: npt.ArrayLike,
    shares_SE: npt.ArrayLike,
    speeds_S: npt.ArrayLike | None = None,
    backlog_S: npt.ArrayLike | None = None,
) -> tuple[Float, float]:
    """Compute each server's share of each expert's load (S, E), and the level (the fullest server's).

    For the client's dispatch of a layer call, and the balancer's plans; see `balancer.policies.split`.
    """
    shares, speeds = _placement(shares_SE, speeds_S)
    servers, experts = shares.shape
    load = _floats("load_E", load_E, (experts,))
    backlog = None if backlog_S is None else _floats("backlog_S", backlog_S, (servers,))
    out_SE, level_B = np.empty_like(shares), np.empty(1)
    _minmax.levels(load, 1, shares, servers, experts, speeds, backlog, level_B, out_SE)
    return out_SE, float(level_B[0])


def levels_of(
    load_BE: npt.ArrayLike, shares_SE: npt.ArrayLike, speeds_S: npt.ArrayLike | None = None
) -> Float:
    """Compute the levels of B batches (B), from which PAR follows; see `balancer.policies.split.levels`."""
    shares, speeds = _placement(shares_SE, speeds_S)
    servers, experts = shares.shape
    batches = len(np.asarray(load_BE))
    load = _floats("load_BE", load_BE, (batches, experts))
    level_B = np.empty(batches)
    _minmax.levels(load, batches, shares, servers, experts, speeds, None, level_B, None)
    return level_B


def _placement(shares_SE: npt.ArrayLike, speeds_S: npt.ArrayLike | None) -> tuple[Float, Float]:
    shares = np.ascontiguousarray(shares_SE, dtype=np.float64)
    if shares.ndim != 2 or not shares.size:
        raise ValueError(f"shares_SE has shape {shares.shape}, wanted servers x experts")
    servers = len(shares)
    speeds = np.ones(servers) if speeds_S is None else _floats("speeds_S", speeds_S, (servers,))
    return shares, speeds


def _floats(name: str, given: npt.ArrayLike, shape: tuple[int, ...]) -> Float:
    array = np.ascontiguousarray(given, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, wanted {shape}")
    return array
