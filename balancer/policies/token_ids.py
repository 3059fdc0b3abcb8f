"""Tells ids of each token's experts from token counts by expert, in arrays that users give.

Both are arrays of whole numbers in three dimensions, (tokens, layers, top-k) and (iterations, layers,
experts), and easily confused.
Shape suffixes: A first axis, L layers, C columns, T tokens, K top-k, I iterations, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_IDS", "MOST_TOP_K", "are_token_ids", "count_token_ids"]

# Limits: no router chooses more experts per token, and no model has more experts in a layer.
MOST_TOP_K = 32
MOST_IDS = 1024
# Short records of counts may look like ids by chance; placements of 3 experts or fewer do not occur.
_FEW_COLUMNS, _FEW_ROWS, _ROWS = 4, 256, 1000
_LONG = 1000
# Ids that are counted at once, so that the temporary arrays stay small.
_BLOCK_IDS = 1 << 22


def are_token_ids(values_ALC: npt.NDArray[Any]) -> bool:
    """Whether an array holds ids of experts by token rather than counts of tokens by expert.

    Counts of one iteration have the same sum in each layer, as each token goes to top-k experts. Ids do not,
    and the ids in a row differ from one another. Short arrays and floats are taken for counts.

    Args:
        values_ALC: At least 0.
    """
    if values_ALC.dtype.kind not in "iu" or values_ALC.ndim != 3:
        return False
    first, layers, columns = values_ALC.shape
    rows, least = first * layers, _FEW_ROWS if columns < _FEW_COLUMNS else _ROWS
    if columns > MOST_TOP_K or rows < least or not columns <= values_ALC.max() < MOST_IDS:
        return False
    sum_AL = values_ALC.sum(axis=2, dtype=np.int64)
    # With one layer, compare the iterations.
    if (sum_AL == (sum_AL[:, :1] if layers > 1 else sum_AL[0])).all():
        return False
    if columns < _FEW_COLUMNS and first > _LONG:
        return True
    sorted_ALC = np.sort(values_ALC, axis=2)
    return bool((sorted_ALC[..., 1:] != sorted_ALC[..., :-1]).all())


def count_token_ids(ids_TLK: npt.NDArray[Any], experts: int, tokens: int) -> npt.NDArray[np.int64]:
    """Convert ids to counts, int64 (I, L, E): tokens of each iteration that went to each expert.

    Args:
        ids_TLK: The experts of each token, in the tokens' order.
        experts: E.
        tokens: Tokens of an iteration; the last one may have fewer.

    Raises:
        ValueError: Not three dimensions of whole numbers, an unknown id, one that a token has twice, or no
            tokens. The message names the place.
    """
    if ids_TLK.ndim != 3 or 0 in ids_TLK.shape or ids_TLK.dtype.kind not in "iu":
        raise ValueError(
            f"has {ids_TLK.dtype} {ids_TLK.shape}, give whole numbers (tokens, layers, top-k)"
        )
    if tokens < 1:
        raise ValueError(f"{tokens} tokens in an iteration, must be at least 1")
    total, layers, top_k = ids_TLK.shape
    iterations = -(-total // tokens)
    counts = np.zeros((iterations, layers, experts), np.int64)
    step = max(1, _BLOCK_IDS // (tokens * layers * top_k))
    for begin in range(0, iterations, step):
        block_TLK = ids_TLK[begin * tokens : (begin + step) * tokens]
        _check_ids(block_TLK, begin * tokens, experts)
        place_TL = (np.arange(len(block_TLK)) // tokens)[:, None] * layers + np.arange(layers)
        place_TLK = place_TL[:, :, None] * experts + block_TLK.astype(np.int64)
        part = counts[begin : begin + step]
        part += np.bincount(place_TLK.ravel(), minlength=part.size).reshape(part.shape)
    return counts


def _check_ids(ids_TLK: npt.NDArray[Any], first: int, experts: int) -> None:
    """Raise ValueError for an id of no expert, or that a token has twice; `first` numbers the tokens."""
    if ids_TLK.min() < 0 or ids_TLK.max() >= experts:
        wrong = (ids_TLK < 0) | (ids_TLK >= experts)
        token, layer, choice = np.unravel_index(int(wrong.argmax()), wrong.shape)
        padding = ids_TLK[token, layer, choice] < 0
        raise ValueError(
            f"token {first + token}, layer {layer} has the id {ids_TLK[token, layer, choice]}, and {experts} "
            f"experts are 0 to {experts - 1}" + (": leave padded tokens out" if padding else "")
        )
    sorted_TLK = np.sort(ids_TLK, axis=2)
    twice_TLK = sorted_TLK[..., 1:] == sorted_TLK[..., :-1]
    if twice_TLK.any():
        token, layer, choice = np.unravel_index(int(twice_TLK.argmax()), twice_TLK.shape)
        raise ValueError(
            f"token {first + token}, layer {layer} has the expert {sorted_TLK[token, layer, choice]} twice, "
            "but a token's experts differ: leave out padded tokens, and layers without experts"
        )
