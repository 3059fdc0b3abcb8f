"""Multi-head latent attention over the paged cache (DeepSeek-V2, section 2.1).

A token has one latent vector c for all heads, and one key k with the rotary embedding. transformers
multiplies c by each head's matrices, and then attends to keys and values. Here the cache holds c and k, the
heads attend to these, and the matrices multiply the queries and the results:

    scores = (q_nope W_k) c + q_rope k
    out    = W_v (sum of weights * c)

A token takes R + rope values in each layer, instead of heads * (nope + rope + V).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["LatentHeads", "latent_heads", "prepare_latents"]

_W_K, _W_V = "_eaas_w_k", "_eaas_w_v"
_CHECKED = 1e-2


class LatentHeads(NamedTuple):
    """What the heads of a layer make of its latent vectors: the two parts of `kv_b_proj`.

    They are copies. torch would copy the parts of a bfloat16 matrix at each product, which takes longer than
    the product of a few tokens.

    Attributes:
        w_k: (heads, nope, R), contiguous.
        w_v: (heads, V, R), contiguous.
    """

    w_k: torch.Tensor
    w_v: torch.Tensor

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Make the queries of latent vectors: (1, heads, T, nope + rope) -> (1, heads, T, R + rope)."""
        nope = self.w_k.shape[1]
        return torch.cat([q[..., :nope] @ self.w_k, q[..., nope:]], dim=-1)

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Make values of sums of latent vectors: (1, T, heads, R) -> (1, T, heads, V)."""
        return (out.transpose(1, 2) @ self.w_v.transpose(1, 2)).transpose(1, 2)


def latent_heads(module: Any) -> LatentHeads | None:
    """Return the heads of an attention module that `prepare_latents` has changed; None: it was not."""
    w_k = getattr(module, _W_K, None)
    return None if w_k is None else LatentHeads(w_k, getattr(module, _W_V))


def prepare_latents(model: Any, paged: str) -> None:
    """Let latent attention pass on latent vectors while the model's attention is `paged`.

    Args:
        model: A transformers causal language model.
        paged: Name of the attention that takes them.

    Raises:
        ValueError: Its latent attention is another.
    """
    for module in model.modules():
        if hasattr(module, "expand_kv") and latent_heads(module) is None:
            heads = _heads_of(module)
            _check(module, heads)
            module.register_buffer(_W_K, heads.w_k, persistent=False)
            module.register_buffer(_W_V, heads.w_v, persistent=False)
            _pass_on(module, paged)


def _heads_of(module: Any) -> LatentHeads:
    rank, nope = module.kv_lora_rank, module.qk_nope_head_dim
    w_HDR = module.kv_b_proj.weight.detach().view(-1, nope + module.v_head_dim, rank)
    return LatentHeads(w_HDR[:, :nope].contiguous(), w_HDR[:, nope:].contiguous())


@torch.no_grad()
def _check(module: Any, heads: LatentHeads) -> None:
    """Raise ValueError if `expand_kv` makes other keys and values than the module above says."""
    rank, dice = module.kv_lora_rank, torch.Generator().manual_seed(0)
    token = torch.randn(rank + module.qk_rope_head_dim, generator=dice).to(heads.w_k)
    latent, shared = token[:rank], token[rank:]
    made = module.expand_kv(latent.view(1, 1, 1, -1), shared.view(1, 1, 1, -1))
    w_k, w_v, latent = heads.w_k.float(), heads.w_v.float(), latent.float()
    keys = torch.cat([w_k @ latent, shared.float().expand(len(w_k), -1)], dim=-1)
    for found, expected in zip(made, (keys, w_v @ latent), strict=True):
        most = _CHECKED * float(expected.abs().max())
        if found.shape[1::2] != expected.shape or not torch.allclose(
            found[0, :, 0].float(), expected, rtol=0.0, atol=most
        ):
            raise ValueError("its latent attention is not DeepSeek's")


def _pass_on(module: Any, paged: str) -> None:
    """Let `expand_kv` join (1, 1, T, R) and (1, 1, T, rope): keys, whose first R values are the values."""
    expand = module.expand_kv

    def expand_kv(latent: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if module.config._attn_implementation != paged:
            found: tuple[torch.Tensor, torch.Tensor] = expand(latent, shared)
            return found
        keys = torch.cat([latent, shared], dim=-1)
        return keys, keys[..., : latent.shape[-1]]

    module.expand_kv = expand_kv
