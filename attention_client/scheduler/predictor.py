"""Which experts a prompt will use, before it runs: a router dry-run, kept by prefix and corrected by what
prefill turned out.

A prediction is pairs of a token and an expert *per token*, for each expert of the first L MoE layers: what
one decode step of the request is expected to load. Requests of different lengths so count alike.

Letters: T tokens, B tokens of a block, K experts of a token, L predicted layers, E logical experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_client.scheduler.cost import Loads

__all__ = ["Predictor", "correlation"]

Ids = npt.NDArray[np.integer]
DryRun = Callable[[Sequence[int]], Ids]

_BLOCK = 16
_FRESH = 0.05
# Of the sums that the correction comes from, what is left after each prompt; and what both begin with, so
# that few pairs do not say much.
_KEPT = 0.98
_DOUBT = 16.0
_MOST_CORRECTION = 4.0


@dataclass(slots=True)
class _Block:
    """The experts of a block of a prompt.

    Attributes:
        ids_LBK: They.
        seen: By prefill; otherwise the dry-run says so.
    """

    ids_LBK: Ids
    seen: bool


class Predictor:
    """Loads of prompts.

    Blocks of a prompt are known by all the tokens up to their end, since with attention the experts of a
    token depend on what was before it. What prefill saw takes the place of what was predicted, and says for
    each expert how far dry-runs are off.

    Args:
        dry_run: From T tokens to the experts that routers would choose, (L, T, K).
        layers, experts, top_k: L, E, K.
        most_blocks: To keep, the least recently used go first.

    Attributes:
        layers: L.
        cached_tokens, dry_tokens: How many tokens were predicted by what was kept, and by a dry-run.
    """

    def __init__(
        self, dry_run: DryRun, layers: int, experts: int, top_k: int, most_blocks: int = 1 << 16
    ) -> None:
        self._dry_run = dry_run
        self.layers, self._experts = layers, experts
        self._most_blocks = most_blocks
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._seen_E = np.full(layers * experts, _DOUBT)
        self._dry_E = np.full(layers * experts, _DOUBT)
        self._usual_E = np.full(layers * experts, top_k / experts)
        self.cached_tokens = self.dry_tokens = 0

    @property
    def loads(self) -> int:
        """Length of a load: L E."""
        return self.layers * self._experts

    def usual(self) -> Loads:
        """The mean request's load, as prefill has seen it lately: for one that is not worth a dry-run."""
        return self._usual_E

    def predict(self, tokens: Sequence[int]) -> Loads:
        """The load of a prompt of at least one token, float64 (L E,)."""
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
        """What prefill has seen of a prompt.

        Args:
            tokens: The prompt.
            first: Its first token that was computed; those before it were in the cache.
            ids_LTK: The experts of the tokens from there on, at least one.

        Returns:
            What they really load, per token: (L E,).
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
            self._seen_E = _DOUBT + (self._seen_E - _DOUBT) * _KEPT + self._count(now)
            self._dry_E = _DOUBT + (self._dry_E - _DOUBT) * _KEPT + self._count(was)
        load_E: Loads = self._count([ids_LTK]) / ids_LTK.shape[1]
        self._usual_E = self._usual_E + (load_E - self._usual_E) * _FRESH
        return load_E

    def _keep(self, key: int, block: _Block) -> None:
        self._blocks[key] = block
        self._blocks.move_to_end(key)
        if len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)

    def _count(self, parts: Sequence[Ids]) -> Loads:
        """Pairs of each expert of each layer."""
        if not parts:
            return np.zeros(self.loads)
        ids_LN = np.concatenate([part.reshape(self.layers, -1) for part in parts], axis=1)
        places = ids_LN + self._experts * np.arange(self.layers)[:, None]
        return np.bincount(places.ravel(), minlength=self.loads).astype(np.float64)


def correlation(a_E: Loads, b_E: Loads) -> float:
    """Pearson's, of a predicted and a true load; 0 where one of them is the same for all experts."""
    a_E, b_E = a_E - a_E.mean(), b_E - b_E.mean()
    scale = float(np.sqrt((a_E @ a_E) * (b_E @ b_E)))
    return float(a_E @ b_E) / scale if scale else 0.0


def _keys(tokens: Sequence[int]) -> Iterator[int]:
    """Of each whole block, in order."""
    key = 0
    for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
        key = hash((key, tuple(tokens[end - _BLOCK : end])))
        yield key
