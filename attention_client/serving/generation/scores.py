"""Log-probabilities of tokens, computed in the engine and formatted by the HTTP handlers.

Shapes: T tokens, K likeliest tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Scores", "score"]

_BLOCK = 64  # rows of the vocabulary's size in float32 at a time


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


def score(logits_TV: torch.Tensor, tokens_T: torch.Tensor, top: int) -> Scores:
    """Compute the log-probabilities of tokens: log_softmax of the logits in float32.

    Args:
        logits_TV: The model's logits, unmodified, on any device.
        tokens_T: int64, the token that follows at each position.
        top: K, the number of likeliest tokens to report.
    """
    logprobs, tops, top_logprobs = [], [], []
    for begin in range(0, len(tokens_T), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        logprob_BV = torch.log_softmax(logits_TV[block].float(), dim=-1)
        logprobs.append(logprob_BV.gather(-1, tokens_T[block, None])[:, 0])
        likeliest = logprob_BV.topk(top, dim=-1)
        tops.append(likeliest.indices)
        top_logprobs.append(likeliest.values)
    return Scores(
        torch.cat(logprobs).cpu().numpy(),
        torch.cat(tops).to(torch.int32).cpu().numpy(),
        torch.cat(top_logprobs).cpu().numpy(),
    )
