"""Sort the (token, expert) pairs of a batch by expert.

T tokens, K top-k, N rows (a token and one of its experts).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Rows", "Run", "batches", "group_rows"]


@dataclass(frozen=True, eq=False)
class Rows:
    """The pairs that name an expert, sorted by expert, in arrival order within an expert.

    Attributes:
        experts: The experts that have rows, ascending.
        ends: For each of them, the end of its rows (exclusive); they begin at the end of the one before, or
            0.
        token_N: Token of each row, int64.
        score_N: Router score of each row, float32.
    """

    experts: list[int]
    ends: list[int]
    token_N: torch.Tensor
    score_N: torch.Tensor


@dataclass(frozen=True)
class Run:
    """Consecutive rows of one expert.

    Attributes:
        place: Of the expert in `Rows.experts`.
        start, end: The rows.
    """

    place: int
    start: int
    end: int


def group_rows(expert_ids_TK: torch.Tensor, scores_TK: torch.Tensor) -> Rows:
    """Sort the pairs by expert.

    Args:
        expert_ids_TK: Any integer dtype; -1 means "none here", and has no row. Other ids, even negative ones,
            are kept: the caller checks whether such an expert exists.
        scores_TK: Float32.
    """
    # numpy: on the few pairs of a decoding step, its calls take a third of torch's time.
    ids_P = expert_ids_TK.numpy().reshape(-1)
    pair_N = np.flatnonzero(ids_P != -1)
    pair_N = pair_N[np.argsort(ids_P[pair_N], kind="stable")]
    ids_N = ids_P[pair_N]
    # Compare neighbours rather than `bincount`: an absurd id must not cost memory.
    last_E = np.flatnonzero(ids_N[1:] != ids_N[:-1])
    ends = [*(last_E + 1).tolist(), len(ids_N)] if len(ids_N) else []
    return Rows(
        experts=[int(ids_N[end - 1]) for end in ends],
        ends=ends,
        token_N=torch.from_numpy(pair_N // expert_ids_TK.shape[1]),
        score_N=torch.from_numpy(scores_TK.numpy().reshape(-1)[pair_N]),
    )


def batches(ends: list[int], limit: int) -> Iterator[list[Run]]:
    """Cut rows into batches of at most `limit` rows, of whole experts if they fit.

    A larger expert is cut: its weights are read once per piece, and its last rows are a batch's first run.
    """
    batch: list[Run] = []
    free = limit
    start = 0
    for place, end in enumerate(ends):
        if end - start > free and batch:
            yield batch
            batch, free = [], limit
        while end - start > limit:
            yield [Run(place, start, start + limit)]
            start += limit
        batch.append(Run(place, start, end))
        free -= end - start
        start = end
    if batch:
        yield batch
