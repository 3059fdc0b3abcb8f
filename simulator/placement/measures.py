"""PAR of a layer in each iteration: by the plan's shares, or as clients divide each batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attention_client.dispatch import Load, dispatch_policy
from balancer.policies.measure import over_mean
from eaas.minmax import levels
from eaas.replicas import Replicas

__all__ = ["dispatch_par", "share_par", "split_par"]

Counts = npt.NDArray[np.generic]
Float = npt.NDArray[np.float64]


def share_par(counts_IE: Counts, shares_SE: Float) -> npt.NDArray[np.float32]:
    """float32 (I): PAR of a layer in each iteration under fixed shares; 1.0 without load."""
    load_IS = counts_IE.astype(np.float32) @ shares_SE.astype(np.float32).T
    return over_mean(load_IS.max(axis=1), load_IS.mean(axis=1))


def split_par(counts_IE: Counts, shares_SE: Float) -> npt.NDArray[np.float32]:
    """float32 (I): PAR of a layer in each iteration under the best division of its batch; 1.0 without load.

    A bound: reading an expert's weights on several servers costs nothing. This takes a max-flow for each
    iteration: tens of microseconds at 64 servers and 256 experts.
    """
    load_IE = counts_IE.astype(np.float64)
    mean_I = load_IE.sum(axis=1) / len(shares_SE)
    return over_mean(levels(load_IE, shares_SE), mean_I).astype(np.float32)


def dispatch_par(counts_IE: Counts, shares_SE: Float) -> npt.NDArray[np.float32]:
    """float32 (I): PAR of a layer in each iteration as an attention client dispatches its batch.

    The client's own code (`DispatchPolicy`), on idle servers of equal speed, with what reading an expert's
    weights costs before it is measured. Some tenths of a millisecond for each iteration at 64 servers, 256
    experts and 1,024 tokens.
    """
    servers = len(shares_SE)
    policy, load = dispatch_policy("least_loaded"), Load(np.ones(servers), np.zeros(servers))
    replicas = Replicas.of(shares_SE[None] > 0, shares_SE[None])
    rooms = [1 << 30] * servers
    peak_I = np.zeros(len(counts_IE))
    for i, counts_E in enumerate(counts_IE.astype(np.int64)):
        ids_P1 = np.repeat(np.arange(len(counts_E)), counts_E)[:, None]
        parts, _ = policy.plan(ids_P1, np.ones(ids_P1.shape, np.bool_), replicas, load, rooms)
        peak_I[i] = max((part.rows_R.size for part in parts), default=0)
    mean_I = counts_IE.astype(np.float64).sum(axis=1) / servers
    return over_mean(peak_I, mean_I).astype(np.float32)
