"""The model, its loss, and faster equal forms of three of its parts for training on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import experts

__all__ = ["Sizes", "build_model", "losses", "next_token_loss"]

_ATTENTION = "grouped_heads"
_LEAST = 1e-30  # a probability that rounds to 0 costs 69 nats, not infinitely many
_ROWS = 512  # logits at a time: 8 MB in float32


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
    """transformers' Qwen3-MoE in bfloat16, with weights drawn from torch's generator.

    On a CPU with this project's ways to compute experts and attention, else with transformers'.
    """
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
        tie_word_embeddings=True,
        max_position_embeddings=context,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=None,
    )
    on_cpu = device.type == "cpu"
    model = Qwen3MoeForCausalLM._from_config(
        config,
        dtype=torch.bfloat16,
        experts_implementation=experts.register() if on_cpu else "grouped_mm",
        attn_implementation=_register_attention() if on_cpu else "sdpa",
    )
    residual_parts = math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            elif "embed" in name:
                weight.normal_(std=0.02)
            else:
                into_residual = name.endswith(("o_proj.weight", "down_proj"))
                scale = residual_parts if into_residual else 1.0
                weight.normal_(std=1 / math.sqrt(weight.shape[-1]) / scale)
    return model.to(device)


def losses(model: Any, ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean next-token loss, and the unevenness of the experts' use (1: even).

    The second is the Switch Transformer's auxiliary loss (Fedus et al., 2021, section 2.2), layer by
    layer over all sequences of the batch, so that a domain may well prefer some experts.
    """
    out = model.model(input_ids=ids_BT[:, :-1], use_cache=False, output_router_logits=True)
    loss = next_token_loss(out.last_hidden_state, model.lm_head.weight, ids_BT[:, 1:])
    config = model.config
    uneven = []
    for logits_TE in out.router_logits:
        probabilities_TE = logits_TE.float().softmax(-1)
        chosen_TK = probabilities_TE.topk(config.num_experts_per_tok, dim=-1).indices
        counts_E = torch.bincount(chosen_TK.flatten(), minlength=config.num_experts)
        share_E = counts_E / chosen_TK.numel()
        uneven.append(config.num_experts * (share_E * probabilities_TE.mean(0)).sum())
    return loss, torch.stack(uneven).mean()


def next_token_loss(
    x_BTH: torch.Tensor, head_VH: torch.Tensor, ids_BT: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy in nats; float32 logits exist for a few rows at a time only."""
    loss: torch.Tensor = _NextTokenLoss.apply(
        x_BTH.reshape(-1, x_BTH.shape[-1]), head_VH, ids_BT.reshape(-1)
    )
    return loss


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, head_VH: torch.Tensor, ids_T: torch.Tensor
    ) -> torch.Tensor:
        tokens = len(ids_T)
        total = torch.zeros((), device=x_TH.device)
        grad_x_TH, grad_head_VH = torch.empty_like(x_TH), torch.zeros_like(head_VH)
        for start in range(0, tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            p_TV = (x_TH[rows] @ head_VH.t()).softmax(-1, dtype=torch.float32)
            picked_T1 = ids_T[rows, None]
            total -= p_TV.gather(1, picked_T1).clamp_min_(_LEAST).log_().sum()
            p_TV.scatter_add_(1, picked_T1, p_TV.new_full(picked_T1.shape, -1.0))
            grad = p_TV.to(x_TH.dtype)
            grad_x_TH[rows] = grad @ head_VH
            grad_head_VH += grad.t() @ x_TH[rows]
        grad_x_TH /= tokens
        grad_head_VH /= tokens
        ctx.save_for_backward(grad_x_TH, grad_head_VH)
        return total / tokens

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad_x_TH, grad_head_VH = ctx.saved_tensors
        return grad_x_TH * grad.to(grad_x_TH.dtype), grad_head_VH * grad.to(grad_x_TH.dtype), None


def _register_attention() -> str:
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)
    return _ATTENTION


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over whole sequences; the queries that share keys are one product.

    Shapes: query (B, heads, T, D), key and value (B, groups, T, D), result (B, T, heads, D).
    """
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    query = (query * scaling).reshape(batch * groups, heads // groups * length, dim)
    key = key.reshape(batch * groups, length, dim)
    value = value.reshape(batch * groups, length, dim)
    scores = torch.bmm(query, key.transpose(1, 2)).view(-1, heads // groups, length, length)
    causal = torch.full((length, length), -torch.inf, dtype=scores.dtype, device=scores.device)
    weights = (scores + causal.triu(1)).softmax(-1)
    out = torch.bmm(weights.view(batch * groups, -1, length), value)
    return out.view(batch, heads, length, dim).transpose(1, 2), None
