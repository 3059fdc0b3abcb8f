"""Draws of tokens for a step's sampled rows, all rows at once.

A draw is the Gumbel-max trick: argmax(score + Gumbel noise) is a draw of softmax(score). The noise of a token
depends on the row's key and the token alone, so a row draws the same token whatever runs beside it, and noise
is needed only for the tokens that the filters leave.

Shapes: S sampled rows, V vocabulary, N tokens that the filters leave in all rows together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Draw", "draw", "key"]

_LIKELY = 1024  # top-p looks at so many tokens first; a flatter row is sorted whole
_BLOCK = 8  # rows of noise at a time
# SplitMix64 (Steele, Lea and Flood, 2014), in signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class Draw:
    """Settings of one row's draw.

    Attributes:
        temperature: Above 0.
        top_p: Keep the smallest set of likeliest tokens with this probability; 1: all.
        top_k: Keep the k likeliest tokens; 0: all.
        min_p: Keep tokens with this fraction of the likeliest token's probability; 0: all.
        key: 64 bits that decide the noise (`key`).
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    key: int


def key(seed: int, length: int) -> int:
    """Return the key of a request's draw at a position: a signed 64-bit hash of seed and position."""
    digest = hashlib.blake2b(f"{seed}:{length}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw(scores_SV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draw one token for each row; return them, int64 (S,).

    Filters apply in vLLM's order: temperature, min-p, top-k, top-p. Tokens with the score of the last token
    that a filter keeps are kept, too.

    Args:
        scores_SV: float32 (S, V), overwritten.
        draws: The settings of each row.
    """

    def column(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=scores_SV.device)

    key_S = column([each.key for each in draws], torch.int64)
    scores_SV /= column([each.temperature for each in draws], scores_SV.dtype)[:, None]
    is_filtered = [each.top_p < 1 or each.top_k > 0 or each.min_p > 0 for each in draws]
    filtered = [s for s, yes in enumerate(is_filtered) if yes]
    free = [s for s, yes in enumerate(is_filtered) if not yes]
    chosen_S = torch.empty_like(key_S)
    if free:
        chosen_S[free] = _draw_free(_rows(scores_SV, free), key_S[free])
    if filtered:
        few_SV = _rows(scores_SV, filtered)
        cutoff_S = _cutoff(few_SV, [draws[s] for s in filtered])
        chosen_S[filtered] = _draw_kept(few_SV, cutoff_S, key_S[filtered])
    return chosen_S


def _rows(scores_SV: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return scores_SV if len(rows) == len(scores_SV) else scores_SV[rows]


def _draw_free(scores_SV: torch.Tensor, key_S: torch.Tensor) -> torch.Tensor:
    token_V = torch.arange(scores_SV.shape[1], device=scores_SV.device)
    blocks = [slice(begin, begin + _BLOCK) for begin in range(0, len(key_S), _BLOCK)]
    chosen = [
        (scores_SV[block] + _gumbel(key_S[block, None], token_V)).argmax(dim=-1) for block in blocks
    ]
    return torch.cat(chosen)


def _draw_kept(
    scores_SV: torch.Tensor, cutoff_S: torch.Tensor, key_S: torch.Tensor
) -> torch.Tensor:
    """Draw among the tokens whose score is at least the row's cutoff."""
    row_N, token_N = (scores_SV >= cutoff_S[:, None]).nonzero(as_tuple=True)
    noisy_N = scores_SV[row_N, token_N] + _gumbel(key_S[row_N], token_N)
    best_S = noisy_N.new_full(key_S.shape, -torch.inf)
    best_S.scatter_reduce_(0, row_N, noisy_N, "amax")
    # The first token among equals.
    candidate_N = torch.where(noisy_N >= best_S[row_N], token_N, scores_SV.shape[1] - 1)
    chosen_S = torch.full_like(key_S, scores_SV.shape[1] - 1)
    return chosen_S.scatter_reduce_(0, row_N, candidate_N, "amin")


def _gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise, float32, for keys and tokens of shapes that broadcast."""
    bits = keys + tokens * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        bits *= factor
    bits ^= (bits >> 31).bitwise_and_((1 << 33) - 1)
    # An exponential variable from 52 bits and a half. It is small where the noise is large, and there
    # float32 is precise; it is never 0 or infinite.
    uniform = (bits >> 12).bitwise_and_((1 << 52) - 1).float().add_(0.5).mul_(2.0**-52)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _cutoff(scores_SV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return the least score that each row's filters keep, float32 (S,)."""
    min_p_S = torch.tensor([each.min_p for each in draws], device=scores_SV.device)
    best_S = scores_SV.amax(dim=-1)
    # Rounding must not remove the likeliest token. A row without min-p keeps all: log(0) is -inf.
    cutoff_S = torch.minimum(best_S, best_S + min_p_S.log())
    vocabulary = scores_SV.shape[1]
    by_count = [s for s, each in enumerate(draws) if 0 < each.top_k < vocabulary]
    if by_count:
        kept_S = torch.tensor([draws[s].top_k for s in by_count], device=scores_SV.device)
        top_SK = _rows(scores_SV, by_count).topk(max(draws[s].top_k for s in by_count)).values
        least_S = top_SK.gather(-1, kept_S[:, None] - 1)[:, 0]
        cutoff_S[by_count] = torch.maximum(cutoff_S[by_count], least_S)
    by_mass = [s for s, each in enumerate(draws) if each.top_p < 1]
    if by_mass:
        mass_S = torch.tensor(
            [draws[s].top_p for s in by_mass], dtype=torch.float64, device=scores_SV.device
        )
        least_S = _nucleus(_rows(scores_SV, by_mass), cutoff_S[by_mass], mass_S)
        cutoff_S[by_mass] = torch.maximum(cutoff_S[by_mass], least_S)
    return cutoff_S


def _nucleus(scores_SV: torch.Tensor, cutoff_S: torch.Tensor, mass_S: torch.Tensor) -> torch.Tensor:
    """Return the score of the last token in each row's nucleus, among the tokens above its cutoff."""
    kept_SV = scores_SV.masked_fill(scores_SV < cutoff_S[:, None], -torch.inf)
    best_S1 = kept_SV.amax(dim=-1, keepdim=True)
    # Sums are in float64, where the order in which a device adds does not matter.
    goal_S = mass_S * (kept_SV - best_S1).exp_().sum(dim=-1, dtype=torch.float64)

    def last(
        top_SK: torch.Tensor, best_S1: torch.Tensor, goal_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sum_SK = (top_SK - best_S1).exp_().cumsum(dim=-1, dtype=torch.float64)
        count_S = (sum_SK < goal_S[:, None]).sum(dim=-1)
        is_inside_S = count_S < top_SK.shape[1]
        index_S = count_S.clamp(max=top_SK.shape[1] - 1)
        return top_SK.gather(-1, index_S[:, None])[:, 0], is_inside_S

    size = min(_LIKELY, kept_SV.shape[1])
    least_S, is_inside_S = last(kept_SV.topk(size).values, best_S1, goal_S)
    if size < kept_SV.shape[1]:
        flat = np.flatnonzero(~is_inside_S.cpu().numpy()).tolist()
        if flat:
            sorted_SV = kept_SV[flat].sort(dim=-1, descending=True).values
            least_S[flat] = last(sorted_SV, best_S1[flat], goal_S[flat])[0]
    return least_S
