"""A model over the paged cache, as the engine calls it at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attention_client.engines.transformers.dense.weights import linear, shared_pool
from attention_client.engines.transformers.first_pass import without_experts
from attention_client.engines.transformers.paged._paged import attend, reads_tensors
from attention_client.engines.transformers.paged.cache import AttentionShape, LayerCache
from attention_client.engines.transformers.paged.latent import prepare_latents
from attention_client.engines.transformers.paged.operators import ATTENTION, reaching
from attention_client.engines.transformers.paged.sequences import Sequences
from attention_client.engines.transformers.remote_experts import remote_experts
from attention_client.engines.transformers.rotary import length_rotaries

__all__ = [
    "PagedModel",
    "Pass",
    "attention_shapes",
    "can_be_paged",
    "latent_kv_heads",
    "use_paged_attention",
]

_DTYPES = (torch.float32, torch.bfloat16)
# Heads that share a row of the cache, and are computed together by one thread (`ROWS` in tile.h).
_MOST_HEADS = 32


Pass = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""[tokens, their positions, int64 (1, T), and rows, int64 (R)] -> [the logits of these rows, (1, R, V)]."""


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
        layers: Each layer's part of the cache, by its index.
        threads: Share the attention, where that is sooner, and a compiled pass's products.

    Attributes:
        compiled: A compiled pass; None: transformers' modules run. Set by another thread.
    """

    def __init__(
        self,
        model: Any,
        layers: Mapping[int, LayerCache],
        threads: int,
    ) -> None:
        self.compiled: Pass | None = None
        self._model = model
        self._layers = layers
        experts = remote_experts(model)
        if experts is not None and experts.cluster is not None:
            # For a compiled pass; transformers' modules have their own.
            self.routed_experts = experts.routed_experts
            self._count_compiled = experts.cluster.metrics.forwards.labels("compiled").inc
        self._pool = shared_pool(threads)
        self._rotaries = length_rotaries(model)
        # Of the pass that runs.
        self._sequences: Sequences | None = None

    @torch.no_grad()
    def run(
        self, tokens_T: torch.Tensor, rows_R: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """Run a forward pass, which adds the keys and values of its tokens to the cache.

        Args:
            tokens_T: int64, the tokens of the sequences one after another.
            rows_R: int64, the tokens whose logits are wanted.
            sequences: The sequences.

        Returns:
            Logits (R, V).

        Raises:
            EaasError: A layer's experts cannot be computed.
        """
        tokens_1T, positions_1T = tokens_T[None], sequences.positions()[None]
        compiled = self.compiled
        self._sequences = sequences
        with reaching(self):
            if compiled is not None:
                self._count_compiled()
                (logits,) = compiled([tokens_1T, positions_1T, rows_R])
            else:
                logits = self._model(
                    input_ids=tokens_1T,
                    position_ids=positions_1T,
                    logits_to_keep=rows_R,
                    use_cache=False,
                    sequences=sequences,
                ).logits
        return logits[0]

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
        keys, values, kind, block_rows, page, window = self._layers[layer]
        sequences = sequences or self._sequences
        assert sequences is not None
        begins, past, tables = sequences
        out = torch.empty((1, q.shape[2], q.shape[1], v.shape[3]), dtype=q.dtype)
        kv_heads = keys.shape[1]
        attend(
            _with_whole_heads(q),
            _with_whole_heads(k).expand(-1, kv_heads, -1, -1),
            _with_whole_heads(v).expand(-1, kv_heads, -1, -1),
            out,
            keys,
            values,
            tables[kind],
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
        return out

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


def latent_kv_heads(heads: int) -> int:
    """Return in how many groups threads compute the heads of latent attention, which share a token's row."""
    return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= _MOST_HEADS)


class _ShapeProbe:
    """Notes what the attention layers of a pass would put into a cache; answers zeros (`Outside`)."""

    def __init__(self) -> None:
        self.shapes: dict[int, AttentionShape] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: Any,
    ) -> torch.Tensor:
        is_latent = k.data_ptr() == v.data_ptr()
        self.shapes[layer] = AttentionShape(k.shape[1], k.shape[3], v.shape[3], is_latent)
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    def routed_experts(self, layer: int, x_TH: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x_TH)

    def rotary(self, positions: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("only compiled passes call this")

    def linear(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        raise RuntimeError("only compiled passes call this")


@torch.no_grad()
def attention_shapes(model: Any) -> dict[int, AttentionShape]:
    """Run a pass of one token, without routed experts; return what each layer puts into a cache.

    Args:
        model: A transformers causal language model whose attention is `ATTENTION`.

    Raises:
        ValueError: Some layers have no attention of this form.
    """
    probe, token = _ShapeProbe(), torch.zeros(1, 1, dtype=torch.long)
    try:
        with reaching(probe), without_experts(model):
            model(
                input_ids=token,
                position_ids=token,
                logits_to_keep=1,
                use_cache=False,
                sequences=Sequences.of([1], [0], [[[0]]]),
            )
    except Exception as error:
        # Models that take other arguments, or need a cache of their own, end with whatever their code raises.
        raise ValueError(f"{type(error).__name__}: {error}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(probe.shapes) != list(range(layers)):
        raise ValueError(
            f"{layers - len(probe.shapes)} of its {layers} layers have no paged attention"
        )
    return probe.shapes


def use_paged_attention(model: Any) -> None:
    """Switch the model's attention to `ATTENTION`.

    Raises:
        ValueError: The model's latent attention is none that the cache serves.
    """
    prepare_latents(model, ATTENTION)
    # `set_attn_implementation` would look for a package of flash attention.
    model.config._attn_implementation = ATTENTION
