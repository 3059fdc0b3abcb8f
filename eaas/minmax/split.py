"""The best split of tokens over a placement's replicas, for plans, the simulator and clients.

    fullness   a server's load (including its backlog) over its speed
    level      fullness of the fullest server under the split that makes it lowest

The min-max split is a max-flow from experts with their loads to servers that hold them. It is found
exactly, by Newton's iteration on the level (W. Dinkelbach 1967) over E. Dinic's max-flow (1970), starting
at the shares of the plan. The compiled core is `_minmax`.
Shape suffixes: B batches, S servers, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eaas.minmax import _minmax

__all__ = ["levels", "split"]

Float = npt.NDArray[np.float64]


def split(
    load_E: npt.ArrayLike,
    shares_SE: npt.ArrayLike,
    speeds_S: npt.ArrayLike | None = None,
    backlog_S: npt.ArrayLike | None = None,
) -> Float:
    """Compute the best shares for one batch, or for a layer's load in the balancer's plans.

    Args:
        load_E: (E,) the batch's tokens of each expert, at least 0.
        shares_SE: (S, E) the plan's shares, or bool; above 0 for each replica.
        speeds_S: (S,) above 0; all 1 by default.
        backlog_S: (S,) load that servers have already. With it the servers below the fullest are also
            levelled (within 1 %), because the fullest may be one that gets nothing of this batch.

    Returns:
        float64 (S, E): shares that sum to 1 for each expert that has a replica. Experts without load keep
            the plan's shares.

    Raises:
        ValueError: An argument is wrong; the message names it.

    Time about O(S * E / 8 + replicas * rounds), some tens of microseconds for 64 x 256.
    """
    shares, speeds = _placement(shares_SE, speeds_S)
    servers, experts = shares.shape
    load = _floats("load_E", load_E, (experts,))
    backlog = None if backlog_S is None else _floats("backlog_S", backlog_S, (servers,))
    out_SE = np.empty_like(shares)
    _minmax.levels(load, 1, shares, servers, experts, speeds, backlog, np.empty(1), out_SE)
    return out_SE


def levels(
    load_BE: npt.ArrayLike, shares_SE: npt.ArrayLike, speeds_S: npt.ArrayLike | None = None
) -> Float:
    """float64 (B): the level of each batch under its own best split, by which the simulator rates placements.

    Divided by load_BE.sum(axis=1) / speeds_S.sum(), the level is the batch's PAR. The arguments are those of
    `split`, with (B, E) loads; the GIL is released.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
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
