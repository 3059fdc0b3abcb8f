"""The parts of a layer call, one per server: pure functions over arrays.

Glossary: a *pair* is one (token, expert) of a layer call; a *part* is the work of one server.
Shape suffixes: T tokens, K experts per token, R tokens of a part, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LOAD_PAIRS", "Part", "pairs_of", "without"]

LOAD_PAIRS = 8.0
"""Pairs of an expert whose computation takes about as long as reading its weights.

6 to 10 by `eaas bench experts` with bfloat16 on two cores of an AMD EPYC without AMX (docs/performance.md).
"""


@dataclass(eq=False, slots=True)
class Part:
    """The work of one server in a layer call.

    Attributes:
        server: Index of the server in the placement.
        rows_R: int64, ascending indices of tokens in the call.
        ids_RK: int32, experts of these tokens; -1 if the pair belongs to another server.
        work: Cost in units of work: 1 per expert for reading its weights, plus 1 per `LOAD_PAIRS` pairs.
    """

    server: int
    rows_R: npt.NDArray[np.int64]
    ids_RK: npt.NDArray[np.int32]
    work: float

    @property
    def pairs_RK(self) -> npt.NDArray[np.bool_]:
        """Mask of the pairs that belong to this part: bool (R, K)."""
        return self.ids_RK >= 0


def without(pairs_TK: npt.NDArray[np.bool_], parts: Sequence[Part]) -> npt.NDArray[np.bool_] | None:
    """Return which of these pairs (T, K) are still to send after these parts; None if no pair is left."""
    left_TK = pairs_TK.copy()
    for part in parts:
        left_TK[part.rows_R] &= ~part.pairs_RK
    return left_TK if left_TK.any() else None


def pairs_of(part: Part, shape_TK: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Return the pairs of a part as a mask over the whole call, to resend or hedge them: bool (T, K)."""
    pairs_TK = np.zeros(shape_TK, dtype=np.bool_)
    pairs_TK[part.rows_R] = part.pairs_RK
    return pairs_TK
