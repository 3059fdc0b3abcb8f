"""Predict, in a client, a prompt's experts: a router dry run, cached by prefix, corrected by prefill.

A prediction is the expected number of (token, expert) pairs *per token* for each expert of the first L MoE
layers, which is the load of one decode step. So requests of different lengths are comparable.

Letters: T tokens, B tokens of a block, K experts of a token, L predicted layers, E logical experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_client.scheduler.strategies import Loads

__all__ = ["Predictor", "correlation"]

Ids = npt.NDArray[np.integer]
DryRun = Callable[[Sequence[int]], Ids]

_BLOCK = 16
_SMOOTHING = 0.05
# Decay of the correction's sums per prompt, and their initial value, which damps corrections from few pairs.
_DECAY = 0.98
_PRIOR = 16.0
_MOST_CORRECTION = 4.0


@dataclass(slots=True)
class _Block:
    """Cached experts of one block of a prompt.

    Attributes:
        ids_LBK: Experts of each token in each layer.
        seen: Whether they are the true ones from prefill; otherwise they are from a dry run.
    """

    ids_LBK: Ids
    seen: bool


class Predictor:
    """Predicts the expert loads of prompts before their prefill, for the scheduler.

    A block's key covers all tokens up to its end, because attention makes a token's experts depend on its
    prefix. Prefill replaces predicted experts by true ones, and corrects each expert's bias in dry runs.

    Args:
        dry_run: Returns the experts that routers choose for T tokens, (L, T, K).
        layers, experts, top_k: L, E, K.
        most_blocks: Capacity of the LRU cache.

    Attributes:
        layers: L.
        cached_tokens, dry_tokens: Total tokens predicted from the cache, and by dry runs.
    """

    def __init__(
        self, dry_run: DryRun, layers: int, experts: int, top_k: int, most_blocks: int = 1 << 16
    ) -> None:
        self._dry_run = dry_run
        self.layers, self._experts = layers, experts
        self._most_blocks = most_blocks
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._seen_E = np.full(layers * experts, _PRIOR)
        self._dry_E = np.full(layers * experts, _PRIOR)
        self._usual_E = np.full(layers * experts, top_k / experts)
        self.cached_tokens = self.dry_tokens = 0

    @property
    def loads(self) -> int:
        """Length of a load vector, L E, with which the queue is made."""
        return self.layers * self._experts

    def usual(self) -> Loads:
        """Return the mean load of recent requests, (L E,): the prediction while the batch has free places."""
        return self._usual_E

    def predict(self, tokens: Sequence[int]) -> Loads:
        """Predict the load per token of a request that must wait, from its prompt (not empty), (L E,)."""
        kept: list[_Block] = []
        keys = list(_keys(tokens))
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            self._blocks.move_to_end(key)
            kept.append(block)
        covered = len(kept) * _BLOCK
        self.cached_tokens += covered
        seen_E = self._count([block.ids_LBK for block in kept if block.seen])
        dry = [block.ids_LBK for block in kept if not block.seen]
        if covered < len(tokens):
            ids_LTK = self._dry_run(tokens[covered:])
            self.dry_tokens += len(tokens) - covered
            dry.append(ids_LTK)
            for place, key in enumerate(keys[len(kept) :]):
                ids_LBK = ids_LTK[:, place * _BLOCK : (place + 1) * _BLOCK]
                self._keep(key, _Block(ids_LBK, seen=False))
        correction_E = (self._seen_E / self._dry_E).clip(1 / _MOST_CORRECTION, _MOST_CORRECTION)
        load_E: Loads = (seen_E + self._count(dry) * correction_E) / len(tokens)
        return load_E

    def saw(self, tokens: Sequence[int], first: int, ids_LTK: Ids) -> Loads:
        """Learn the true experts of a prompt after its prefill, to correct later predictions.

        Args:
            tokens: The prompt.
            first: First computed token; the tokens before it were in the key-value cache.
            ids_LTK: Experts of the tokens from `first` on, at least one.

        Returns:
            Their true load per token, (L E,).
        """
        was: list[Ids] = []
        now: list[Ids] = []
        for place, key in enumerate(_keys(tokens)):
            begin = place * _BLOCK - first
            if begin < 0 or begin + _BLOCK > ids_LTK.shape[1]:
                continue
            ids_LBK = ids_LTK[:, begin : begin + _BLOCK]
            known = self._blocks.get(key)
            if known is not None and not known.seen:
                was.append(known.ids_LBK)
                now.append(ids_LBK)
            self._keep(key, _Block(ids_LBK, seen=True))
        if now:
            self._seen_E = _PRIOR + (self._seen_E - _PRIOR) * _DECAY + self._count(now)
            self._dry_E = _PRIOR + (self._dry_E - _PRIOR) * _DECAY + self._count(was)
        load_E: Loads = self._count([ids_LTK]) / ids_LTK.shape[1]
        self._usual_E = self._usual_E + (load_E - self._usual_E) * _SMOOTHING
        return load_E

    def _keep(self, key: int, block: _Block) -> None:
        self._blocks[key] = block
        self._blocks.move_to_end(key)
        if len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)

    def _count(self, parts: Sequence[Ids]) -> Loads:
        """Count the pairs of each expert of each layer, float64 (L E,)."""
        if not parts:
            return np.zeros(self.loads)
        ids_LN = np.concatenate([part.reshape(self.layers, -1) for part in parts], axis=1)
        places = ids_LN + self._experts * np.arange(self.layers)[:, None]
        return np.bincount(places.ravel(), minlength=self.loads).astype(np.float64)


def correlation(a_E: Loads, b_E: Loads) -> float:
    """Return the Pearson correlation of a predicted and a true load, for metrics; 0 if one is constant."""
    a_E, b_E = a_E - a_E.mean(), b_E - b_E.mean()
    scale = float(np.sqrt((a_E @ a_E) * (b_E @ b_E)))
    return float(a_E @ b_E) / scale if scale else 0.0


def _keys(tokens: Sequence[int]) -> Iterator[int]:
    """Yield the cache keys of a prompt's whole blocks, in order; each covers all tokens before its end."""
    key = 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        key = hash((key, tuple(tokens[end - _BLOCK : end])))
        yield key
