"""Cut the arguments of a decoder's forward pass into two micro-batches, for double-batch overlap.

A batch has one of two forms: padded (one row per sequence, from `generate`) and paged (one row with block
tables, from `PagedModel`). Any other form is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from attention_client.engines.transformers.overlap.rows_cache import can_be_split, rows_caches
from attention_client.engines.transformers.paged.sequences import Sequences

__all__ = ["MicroBatches", "cut"]

# A micro-batch with a smaller share of the tokens is too short to hide the other one's wait.
_LEAST_SHARE = 0.25
_PADDED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values")
_NEUTRAL = ("return_dict", "is_causal")


class MicroBatches(NamedTuple):
    """The two micro-batches of a forward pass.

    Attributes:
        sequences: Sequences in the batch.
        tokens: Tokens in the batch.
        calls: Keyword arguments of the decoder for each micro-batch.
        spans: Tokens of each micro-batch, in the batch's flattened order.
        dim: Dimension of the decoder's output to concatenate along.
        cache: The whole batch's cache; None if the decoder returns none.
    """

    sequences: int
    tokens: int
    calls: list[dict[str, Any]]
    spans: list[slice]
    dim: int
    cache: Any = None


def cut(arguments: Mapping[str, Any]) -> MicroBatches | None:
    """Cut a forward pass's batch into two micro-batches of whole sequences.

    Args:
        arguments: Keyword arguments of a transformers decoder (`Qwen3MoeModel.forward`, for instance).

    Returns:
        The micro-batches; None (run it whole) if it cannot be cut or the parts are too uneven.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    if isinstance(given.get("sequences"), Sequences):
        return _cut_paged(given)
    return _cut_padded(given)


def _cut_padded(given: dict[str, Any]) -> MicroBatches | None:
    tokens_BT = given.get("input_ids", given.get("inputs_embeds"))
    if not isinstance(tokens_BT, torch.Tensor) or tokens_BT.ndim < 2 or tokens_BT.shape[0] < 2:
        return None
    batch, steps = tokens_BT.shape[:2]
    cache = given.get("past_key_values")
    # Without a cache argument the decoder makes a cache, which the caller expects back.
    if not can_be_split(cache) if cache is not None else given.get("use_cache") is not False:
        return None
    for key, value in given.items():
        if key == "past_key_values":
            continue
        if key not in _PADDED:
            # False switches a feature off. A batch with any other unknown argument is not cut.
            if key != "use_cache" and value is not False and key not in _NEUTRAL:
                return None
        elif not isinstance(value, torch.Tensor) or value.shape[0] not in (1, batch):
            return None
        elif key == "position_ids" and value.ndim != 2:
            return None  # Multimodal positions, whose first dimension is not the batch.
    middle = batch // 2
    rows = [slice(0, middle), slice(middle, batch)]
    caches = [None, None] if cache is None else rows_caches(cache, rows, batch)
    calls = []
    for part, part_cache in zip(rows, caches, strict=True):
        call = {
            key: value[part] if key in _PADDED and value.shape[0] == batch else value
            for key, value in given.items()
            if key != "past_key_values"
        }
        if part_cache is not None:
            call["past_key_values"] = part_cache
        calls.append(call)
    spans = [slice(part.start * steps, part.stop * steps) for part in rows]
    return MicroBatches(batch, batch * steps, calls, spans, 0, cache)


def _cut_paged(given: dict[str, Any]) -> MicroBatches | None:
    sequences: Sequences = given["sequences"]
    bounds = sequences.begins.tolist()
    parts = _halves(bounds)
    if parts is None or bounds[-1] != given["input_ids"].shape[1]:
        return None
    spans = [slice(bounds[part.start], bounds[part.stop]) for part in parts]
    calls = [
        given
        | {
            "input_ids": given["input_ids"][:, span],
            "position_ids": given["position_ids"][:, span],
            "sequences": sequences.part(part),
        }
        for part, span in zip(parts, spans, strict=True)
    ]
    return MicroBatches(len(bounds) - 1, bounds[-1], calls, spans, 1)


def _halves(bounds: list[int]) -> list[slice] | None:
    """Cut sequences with these bounds where the tokens are halved; None: the parts would be too uneven."""
    sequences, tokens = len(bounds) - 1, bounds[-1]
    middle = min(range(1, sequences + 1), key=lambda i: abs(2 * bounds[i] - tokens))
    if min(bounds[middle], tokens - bounds[middle]) < _LEAST_SHARE * tokens:
        return None
    return [slice(0, middle), slice(middle, sequences)]
