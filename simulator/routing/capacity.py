"""Expert capacity: a limit on an expert's tokens in a batch, by dropping or spilling the tokens over it.

Switch Transformer and GShard drop tokens over the limit (only the residual continues); serving systems spill
them to the token's next choice. Serving factors are usually 1.2 to 1.5.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["drop_over_capacity", "expert_capacity", "spill_over_capacity"]

Ids = npt.NDArray[np.int64]


def expert_capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Compute the most tokens of a batch for an expert: floor(factor * tokens * top_k / experts).

    Raises ValueError: experts is below 1, or factor is negative.
    """
    if experts < 1:
        raise ValueError(f"experts: {experts}, must be at least 1")
    if not factor >= 0:
        raise ValueError(f"factor: {factor}, must be at least 0")
    return math.floor(factor * (tokens * top_k / experts))


def drop_over_capacity(ids_TK: npt.ArrayLike, experts: int, capacity: int) -> npt.NDArray[np.bool_]:
    """Return a mask of kept places: the first `capacity` of each expert in the order of the batch.

    Args:
        ids_TK: (T) or (T, K): experts of each token.
        experts: E.
        capacity: Capacity of each expert; see `expert_capacity`.

    Returns:
        bool, in the shape of ids_TK. False: the expert skips the token, which passes unchanged.
    """
    ids = np.asarray(ids_TK, np.int64)
    return np.asarray(_arrival(ids.ravel(), experts) < capacity).reshape(ids.shape)


def spill_over_capacity(choices_TC: npt.ArrayLike, experts: int, capacity: int) -> Ids:
    """Assign each token an expert when tokens over an expert's capacity go to their next choice.

    First choices come before second ones: each round moves all tokens without an expert to their next
    choice, in the order of the batch.

    Args:
        choices_TC: (T, C): experts of each token, best first.
        experts: E.
        capacity: Capacity of each expert.

    Returns:
        int64 (T); -1: the token is dropped, because no choice has capacity left.
    """
    choices = np.asarray(choices_TC, np.int64)
    expert_T = np.full(len(choices), -1, np.int64)
    left_E = np.full(experts, capacity, np.int64)
    for choice_T in choices.T:
        waiting = np.flatnonzero(expert_T < 0)
        wanted = choice_T[waiting]
        taken = _arrival(wanted, experts) < left_E[wanted]
        expert_T[waiting[taken]] = wanted[taken]
        left_E -= np.bincount(wanted[taken], minlength=experts)
    return expert_T


def _arrival(ids_N: Ids, experts: int) -> Ids:
    """int64 (N): the number of earlier places with the same expert."""
    order_N = np.argsort(ids_N, kind="stable")
    counts_E = np.bincount(ids_N, minlength=experts)
    first_E = np.cumsum(counts_E) - counts_E
    arrival_N = np.empty_like(ids_N)
    arrival_N[order_N] = np.arange(len(ids_N)) - first_E[ids_N[order_N]]
    return arrival_N
