"""A model over the paged cache, as transformers' continuous batching calls it at each step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from attention_client.engines.transformers.dense.weights import linear, shared_pool
from attention_client.engines.transformers.paged._paged import attend, reads_tensors
from attention_client.engines.transformers.paged.batch import PagedBatch, Sequences
from attention_client.engines.transformers.paged.latent import LatentSizes, prepare_latents
from attention_client.engines.transformers.paged.operators import ATTENTION, reaching
from attention_client.engines.transformers.rotary import length_rotaries

__all__ = ["PagedModel", "Pass", "RoutedExperts", "can_be_paged", "use_paged_attention"]

_DTYPES = (torch.float32, torch.bfloat16)
# Heads that share a row of the cache, and are computed together by one thread (`ROWS` in tile.h).
_MOST_HEADS = 32


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
        threads: Share the attention, where that is sooner, and a compiled pass's products.
        latent: What the cache has of a token; None: the model has no latent attention.

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
        latent: LatentSizes | None = None,
    ) -> None:
        self.compiled: Pass | None = None
        self.attended = False
        self._model = model
        self._batch = batch
        self._routed_experts = routed_experts
        self._count = count
        self._pool = shared_pool(threads)
        self._rotaries = length_rotaries(model)
        config = model.config.get_text_config()
        self._layers = {
            layer: (
                _layer_cache(allocator, layer)
                if latent is None
                else _latent_cache(allocator, layer, latent, config.num_attention_heads)
            )
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
        out = torch.empty((1, q.shape[2], q.shape[1], v.shape[3]), dtype=q.dtype)
        kv_heads = keys.shape[1]
        attend(
            _with_whole_heads(q),
            _with_whole_heads(k).expand(-1, kv_heads, -1, -1),
            _with_whole_heads(v).expand(-1, kv_heads, -1, -1),
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

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute a product with a dense weight in a compiled pass; see `operators.Outside`."""
        return linear(x, weight, bias, self._pool)

    def rotary(
        self, positions: torch.Tensor, place: int, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the cosines and sines of a rotary module in a compiled pass; see `operators.Outside`."""
        cosines, sines = self._rotaries[place].in_float32(positions, layer_type)
        return cosines, sines


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


def _latent_cache(allocator: Any, layer: int, sizes: LatentSizes, heads: int) -> _LayerCache:
    """Return a layer's latent vectors with their keys, (rows, kv_heads, width), and without, as values.

    A page has one token after the other where transformers would have keys, and then values.
    """
    if getattr(allocator, "sliding_window", 0):
        raise ValueError("its latent attention has a sliding window")
    tokens, page = allocator.cache_tensor.shape[0], allocator.tokens_per_page
    rows = allocator.cache_tensor.view(tokens, 1, -1)[allocator.layer_indices.index(layer) * page :]
    # All heads share a token's row. Threads share the heads, in groups that the kernel computes together.
    kv_heads = next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= _MOST_HEADS)
    keys = rows[..., : sizes.width].expand(-1, kv_heads, -1)
    values = keys[..., : sizes.rank]
    return _LayerCache(keys, values, allocator.index, allocator.block_physical_stride // 2, page, 0)


def use_paged_attention(model: Any) -> tuple[str, LatentSizes | None]:
    """Switch the model's attention to `ATTENTION`.

    Returns:
        The name of the one before, and what the cache has of a token, if it is latent attention.

    Raises:
        ValueError: The model's latent attention is none that the cache serves.
    """
    latent = prepare_latents(model, ATTENTION)
    before = str(model.config._attn_implementation)
    # `set_attn_implementation` would look for a package of flash attention.
    model.config._attn_implementation = ATTENTION
    return before, latent
