"""Which replica computes which (token, expert) pair: pure functions over arrays.

Words: a *pair* is one (token, expert) of a layer call; a *part* is what one server is to compute of it.
Shape suffixes: T tokens, K experts per token, S servers, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Part", "assign", "cumulative_shares", "split"]

NOWHERE = -1
# 1 / golden ratio: multiples of it, taken modulo 1, are spread evenly however many are taken.
_STEP = 0.6180339887498949


@dataclass(frozen=True, eq=False)
class Part:
    """What one server is to compute of a layer call.

    Attributes:
        server: Index of the server in the placement.
        rows_R: int64 (R,), the tokens concerned, ascending.
        pairs_RK: bool (R, K), which experts of those tokens are this server's.
    """

    server: int
    rows_R: npt.NDArray[np.int64]
    pairs_RK: npt.NDArray[np.bool_]


def cumulative_shares(
    shares_SE: npt.NDArray[np.float32], usable_S: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Shares of the usable servers, summed up over the servers and scaled to end at 1.

    Args:
        shares_SE: Shares of one layer (placement).
        usable_S: Servers that may be asked.

    Returns:
        float64 (S, E). The column of an expert with no usable replica is 0 throughout.
    """
    cumulative_SE = np.cumsum(shares_SE * usable_S[:, None], axis=0, dtype=np.float64)
    total_E = cumulative_SE[-1]
    scaled_SE = np.zeros_like(cumulative_SE)
    np.divide(cumulative_SE, total_E, out=scaled_SE, where=total_E[None, :] > 0)
    return scaled_SE


def assign(
    ids_TK: npt.NDArray[np.int64],
    wanted_TK: npt.NDArray[np.bool_],
    cumulative_SE: npt.NDArray[np.float64],
    phase: float,
    pairs_per_replica: int = 64,
) -> npt.NDArray[np.int64]:
    """Choose a server for every wanted pair, in proportion to the shares.

    All pairs of an expert go to one replica while they are few, since a replica reads the expert's weights
    once however many tokens it has; more than `pairs_per_replica` are spread.

    Args:
        ids_TK: Logical expert of each pair.
        wanted_TK: Pairs that are to be assigned.
        cumulative_SE: From `cumulative_shares`.
        phase: In [0, 1); different from call to call, so that the shares hold over calls.
        pairs_per_replica: Pairs of one expert that stay together.

    Returns:
        int64 (T, K): index of a server, NOWHERE for a pair not wanted or without a usable replica.
    """
    server_TK = np.full(ids_TK.shape, NOWHERE, dtype=np.int64)
    experts_P = ids_TK[wanted_TK]
    if experts_P.size == 0:
        return server_TK
    active_A, inverse_P = np.unique(experts_P, return_inverse=True)
    draw_P = phase + _STEP * inverse_P
    if experts_P.size > pairs_per_replica:
        order_P = np.argsort(inverse_P, kind="stable")
        counts_A = np.bincount(inverse_P)
        rank_P = np.empty_like(order_P)
        rank_P[order_P] = np.arange(order_P.size) - np.repeat(
            np.cumsum(counts_A) - counts_A, counts_A
        )
        draw_P = draw_P + _STEP * (rank_P // pairs_per_replica)
    draw_P = draw_P % 1.0
    columns_SP = cumulative_SE[:, active_A][:, inverse_P]
    # The first server whose cumulative share passes the draw: always one with a share above 0.
    chosen_P = (columns_SP <= draw_P[None, :]).sum(axis=0)
    server_TK[wanted_TK] = np.where(columns_SP[-1] > 0, chosen_P, NOWHERE)
    return server_TK


def split(server_TK: npt.NDArray[np.int64], max_tokens: dict[int, int]) -> list[Part]:
    """Group assigned pairs into parts: a token goes to a server once, with all its experts there.

    Args:
        server_TK: From `assign`.
        max_tokens: Tokens that one slot of a server takes; larger parts are cut.

    Returns:
        The parts in ascending order of server and token.
    """
    parts = []
    for server in np.unique(server_TK):
        if server == NOWHERE:
            continue
        pairs_TK = server_TK == server
        rows_R = np.flatnonzero(pairs_TK.any(axis=1))
        step = max_tokens[int(server)]
        for start in range(0, rows_R.size, step):
            some_R = rows_R[start : start + step]
            parts.append(Part(int(server), some_R, pairs_TK[some_R]))
    return parts
