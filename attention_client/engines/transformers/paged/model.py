"""A model over the paged cache, as transformers' continuous batching calls it at each step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from attention_client.engines.transformers.paged._paged import attend, pool, reads_tensors
from attention_client.engines.transformers.paged.batch import PagedBatch, Sequences
from attention_client.engines.transformers.paged.operators import ATTENTION, reaching

__all__ = ["PagedModel", "Pass", "RoutedExperts", "can_be_paged", "use_paged_attention"]

_DTYPES = (torch.float32, torch.bfloat16)


Pass = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Tokens and their positions, int64 (1, T), and rows, int64 (R) -> the logits of these rows, (1, R, V)."""
RoutedExperts = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A MoE layer's index, (T, H), (T, K), float32 (T, K) -> the weighted sum of its routed experts, (T, H)."""


class _LayerCache(NamedTuple):
    """One layer's part of the paged cache, as `_paged.attend` takes it."""

    keys: torch.Tensor
    values: torch.Tensor
    allocator: int
    block_rows: int
    page: int
    window: int


def can_be_paged(model: Any) -> bool:
    """Whether the model's device, dtype and way to choose rows of logits are those of `PagedModel`."""
    return bool(
        reads_tensors
        and model.device.type == "cpu"
        and model.dtype in _DTYPES
        and model._supports_logits_to_keep()
    )


class PagedModel:
    """Runs forward passes of continuous batching, in transformers' modules or in a compiled pass.

    Args:
        model: A transformers causal language model whose attention is `ATTENTION`.
        cache: transformers' `PagedAttentionCache`.
        batch: Inputs of the next pass.
        routed_experts: Computes routed experts for a compiled pass; transformers' modules have their own.
        count: Called for each compiled pass.
        threads: Share the attention, where that is sooner.

    Attributes:
        compiled: A compiled pass; None: transformers' modules run. Set by another thread.
        attended: Whether a pass has used the cache.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        batch: PagedBatch,
        routed_experts: RoutedExperts | None,
        count: Callable[[], None],
        threads: int,
    ) -> None:
        self.compiled: Pass | None = None
        self.attended = False
        self._model = model
        self._batch = batch
        self._routed_experts = routed_experts
        self._count = count
        self._pool = pool(threads)
        self._layers = {
            layer: _layer_cache(allocator, layer)
            for layer, allocator in cache.layer_to_allocator.items()
        }

    def _supports_logits_to_keep(self) -> bool:
        return True

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        **_: Any,
    ) -> Any:
        """Run a forward pass. Called by transformers' `ModelRunner`.

        Args:
            input_ids: int32 (1, T), the tokens of the batch's sequences one after another.
            position_ids: int32 (1, T).
            logits_to_keep: int (R), rows.

        Returns:
            An object with `logits`, (1, R, V).
        """
        compiled = self.compiled
        with reaching(self):
            if compiled is not None:
                self._count()
                logits = compiled(input_ids.long(), position_ids.long(), logits_to_keep.long())
            else:
                logits = self._model(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    logits_to_keep=logits_to_keep,
                    use_cache=False,
                    sequences=self._batch.sequences,
                ).logits
        return SimpleNamespace(logits=logits)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        sequences: Sequences | None = None,
    ) -> torch.Tensor:
        """Attend to the sequences and extend them; see `operators.Outside`."""
        keys, values, allocator, block_rows, page, window = self._layers[layer]
        begins, past, tables = sequences or self._batch.sequences
        out = torch.empty((1, q.shape[2], q.shape[1], q.shape[3]), dtype=q.dtype)
        attend(
            _with_whole_heads(q),
            _with_whole_heads(k),
            _with_whole_heads(v),
            out,
            keys,
            values,
            tables[allocator],
            begins,
            past,
            block_rows,
            page,
            window,
            scale,
            softcap,
            sinks,
            self._pool,
        )
        self.attended = True
        return out

    def routed_experts(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
    ) -> torch.Tensor:
        """Compute the routed experts of a MoE layer in a compiled pass; see `operators.Outside`."""
        if self._routed_experts is None:
            raise RuntimeError("this model's experts are in its modules")
        return self._routed_experts(layer, x_TH, ids_TK, scores_TK)


def _with_whole_heads(x: torch.Tensor) -> torch.Tensor:
    """Return (1, heads, T, D) with the values of a head side by side, copied if need be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _layer_cache(allocator: Any, layer: int) -> _LayerCache:
    keys, values = allocator._kv_token_views[layer]
    return _LayerCache(
        keys,
        values,
        allocator.index,
        allocator.block_physical_stride,
        allocator.tokens_per_page,
        getattr(allocator, "sliding_window", 0),
    )


def use_paged_attention(model: Any) -> str:
    """Switch the model's attention to `ATTENTION`; return the name of the one before."""
    before = str(model.config._attn_implementation)
    # `set_attn_implementation` would look for a package of flash attention.
    model.config._attn_implementation = ATTENTION
    return before
