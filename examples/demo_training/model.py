"""The model: transformers' Qwen3-MoE in a small size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Sizes", "build_model"]

_EVENNESS = 0.001
"""Weight of the auxiliary loss that spreads tokens over experts. Small: experts may take to a domain."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model: with these and a vocabulary of 4,096, 15.3 million parameters."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    experts: int = 32
    top_k: int = 4
    width: int = 64


def build_model(
    vocab: int, context: int, end: int, device: torch.device, sizes: Sizes | None = None
) -> Any:
    """A model with random weights in float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = sizes or Sizes()
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads // 2,
        head_dim=sizes.hidden // sizes.heads,
        moe_intermediate_size=sizes.width,
        intermediate_size=sizes.width,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        router_aux_loss_coef=_EVENNESS,
        tie_word_embeddings=True,
        max_position_embeddings=context,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).to(device)
