"""Changes of a step's logits by the tokens that a sequence already holds, before the next token is chosen.

Shapes: R rows, U distinct tokens of one sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

__all__ = ["MOST_SCORE", "History", "Penalties", "penalize"]

MOST_SCORE = 1e30
"""Largest score; the least is its negative. A larger one, divided by a temperature, may become infinite."""


class Penalties(Protocol):
    """The settings of one sequence that `penalize` reads; `Sampling` has them."""

    @property
    def presence_penalty(self) -> float:
        """Subtracted from each token that was generated."""

    @property
    def frequency_penalty(self) -> float:
        """Subtracted once for each time that a token was generated."""

    @property
    def repetition_penalty(self) -> float:
        """Divides the positive logit of each token of prompt and answer, and multiplies a negative one."""


class History:
    """The distinct tokens of one sequence and how often each was generated, kept up to date step by step.

    Args:
        prompt_length: Tokens of the prompt; later ones are generated.

    Attributes:
        length: Tokens added so far.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._place: dict[int, int] = {}
        self._tokens: list[int] = []
        self._counts: list[int] = []
        self.length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the sequence's next tokens."""
        for token in tokens:
            place = self._place.setdefault(token, len(self._tokens))
            if place == len(self._tokens):
                self._tokens.append(token)
                self._counts.append(0)
            self._counts[place] += self.length >= self._prompt_length
            self.length += 1

    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the distinct tokens (U,), int64, and how often each was generated (U,), float32."""
        return np.array(self._tokens, np.int64), np.array(self._counts, np.float32)


def penalize(
    scores_RV: torch.Tensor,
    rows: Sequence[int],
    settings: Sequence[Penalties],
    of: Sequence[History],
) -> None:
    """Apply the penalties of some rows in place, all rows at once.

    A score of -inf, a banned token's, stays; a finite one stays finite, so that it is above those.

    Args:
        scores_RV: float32 (R, V).
        rows: Indices of the rows with penalties.
        settings: The settings of each of these rows.
        of: The history of each of these rows.
    """
    arrays = [history.arrays() for history in of]
    sizes = [len(tokens) for tokens, _ in arrays]

    def spread(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.repeat(values, sizes)).to(scores_RV.device, dtype)

    row_U = spread(rows, torch.int64)
    token_U = torch.from_numpy(np.concatenate([tokens for tokens, _ in arrays])).to(row_U.device)
    count_U = torch.from_numpy(np.concatenate([counts for _, counts in arrays])).to(row_U.device)
    presence_U = spread([each.presence_penalty for each in settings], torch.float32)
    frequency_U = spread([each.frequency_penalty for each in settings], torch.float32)
    repetition_U = spread([each.repetition_penalty for each in settings], torch.float32)
    before_U = scores_RV[row_U, token_U]
    score_U = torch.where(before_U > 0, before_U / repetition_U, before_U * repetition_U)
    score_U -= frequency_U * count_U + presence_U * (count_U > 0)
    score_U.clamp_(-MOST_SCORE, MOST_SCORE)
    scores_RV[row_U, token_U] = score_U.masked_fill_(before_U == -torch.inf, -torch.inf)
