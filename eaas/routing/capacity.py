"""Expert capacity: a limit on the tokens that an expert takes of a batch, and what is done about the rest.

Switch Transformer and GShard drop what is over the limit (the token goes on as its residual); serving
systems rather spill it to the token's next choice. Serving factors are usually 1.2 to 1.5.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["drop_over_capacity", "expert_capacity", "spill_over_capacity"]

Ids = npt.NDArray[np.int64]


def expert_capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Tokens that an expert takes of a batch: floor(factor * tokens * top_k / experts).

    Raises:
        ValueError: experts is below 1, or factor is negative.
    """
    if experts < 1:
        raise ValueError(f"experts: {experts}, must be at least 1")
    if not factor >= 0:
        raise ValueError(f"factor: {factor}, must be at least 0")
    return math.floor(factor * (tokens * top_k / experts))


def drop_over_capacity(ids_TK: npt.ArrayLike, experts: int, capacity: int) -> npt.NDArray[np.bool_]:
    """Which places the experts keep: the first `capacity` of each expert in the order of the batch.

    Args:
        ids_TK: (T) or (T, K): experts of each token.
        experts: E.
        capacity: Of each expert; see `expert_capacity`.

    Returns:
        bool, in the shape of ids_TK. What is False is skipped: the token passes unchanged.
    """
    ids = np.asarray(ids_TK, np.int64)
    return np.asarray(_arrival(ids.ravel(), experts) < capacity).reshape(ids.shape)


def spill_over_capacity(choices_TC: npt.ArrayLike, experts: int, capacity: int) -> Ids:
    """The expert of each token where what one expert cannot take goes to the token's next choice.

    First choices come before second ones: a round takes all tokens without an expert, in the order of the
    batch, to their next choice.

    Args:
        choices_TC: (T, C): experts of each token, best first.
        experts: E.
        capacity: Of each expert.

    Returns:
        int64 (T); -1 where no choice has room (the token is dropped).
    """
    choices = np.asarray(choices_TC, np.int64)
    expert_T = np.full(len(choices), -1, np.int64)
    room_E = np.full(experts, capacity, np.int64)
    for choice_T in choices.T:
        waiting = np.flatnonzero(expert_T < 0)
        wanted = choice_T[waiting]
        taken = _arrival(wanted, experts) < room_E[wanted]
        expert_T[waiting[taken]] = wanted[taken]
        room_E -= np.bincount(wanted[taken], minlength=experts)
    return expert_T


def _arrival(ids_N: Ids, experts: int) -> Ids:
    """int64 (N): how many earlier places have the same expert."""
    order_N = np.argsort(ids_N, kind="stable")
    counts_E = np.bincount(ids_N, minlength=experts)
    first_E = np.cumsum(counts_E) - counts_E
    arrival_N = np.empty_like(ids_N)
    arrival_N[order_N] = np.arange(len(ids_N)) - first_E[ids_N[order_N]]
    return arrival_N
