"""Log-probabilities of tokens from a model's logits.

Shapes: T tokens, K likeliest tokens of each, V vocabulary.
"""

from __future__ import annotations

import torch

from eaas.generation.scores import Scores

__all__ = ["score"]

_BLOCK = 64  # rows of the vocabulary's size in float32 at a time


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
