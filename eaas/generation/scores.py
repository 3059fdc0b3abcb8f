"""Log-probabilities of tokens, as an engine reports them.

Shapes: T tokens, K likeliest tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Scores"]


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of consecutive tokens of one sequence, from the model's own distribution.

    Attributes:
        logprob_T: float32; NaN: none, for the first token of a prompt.
        top_TK: int32, the likeliest tokens at each position, likeliest first.
        top_logprob_TK: float32, their log-probabilities.
    """

    logprob_T: npt.NDArray[np.float32]
    top_TK: npt.NDArray[np.int32]
    top_logprob_TK: npt.NDArray[np.float32]

    @classmethod
    def none(cls, top: int) -> Scores:
        """Return the scores of a token that nothing precedes, with `top` columns."""
        nan = np.full((1, top), np.nan, np.float32)
        return cls(np.full(1, np.nan, np.float32), np.zeros((1, top), np.int32), nan)

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Concatenate the scores of consecutive tokens; all parts have the same K."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.logprob_T for part in parts]),
            np.concatenate([part.top_TK for part in parts]),
            np.concatenate([part.top_logprob_TK for part in parts]),
        )

    def rows(self, begin: int, end: int, top: int) -> Scores:
        """Return the scores of tokens begin to end, with the `top` likeliest tokens of each."""
        part = slice(begin, end)
        return Scores(
            self.logprob_T[part], self.top_TK[part, :top], self.top_logprob_TK[part, :top]
        )
