"""Latent attention: keys and values from latent vectors, multiplied after the attention, not before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from attention_client.engines.transformers.paged.latent import (
    latent_heads,
    prepare_latents,
)

PAGED = "some_flash"
CONFIG = DeepseekV3Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=32,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=None,
    kv_lora_rank=13,
    qk_rope_head_dim=6,
    qk_nope_head_dim=10,
    v_head_dim=12,
)


def model(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIG)
    config.update(changes)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for layer in made.model.layers:
        torch.nn.init.normal_(layer.self_attn.kv_b_proj.weight)
    return made


@torch.no_grad()
def test_scores_and_values_are_those_of_the_expanded_keys() -> None:
    made = model()
    attention = made.model.layers[0].self_attn
    latent, shared = torch.randn(1, 1, 5, 13), torch.randn(1, 1, 5, 6)
    q, weights = torch.randn(1, 4, 5, 16), torch.rand(1, 4, 5, 5)
    keys, values = attention.expand_kv(latent, shared)
    assert latent_heads(attention) is None
    prepare_latents(made, PAGED)
    heads = latent_heads(attention)
    assert heads is not None

    # While the model's attention is another, the module computes what it did.
    assert torch.equal(attention.expand_kv(latent, shared)[0], keys)
    made.config._attn_implementation = PAGED
    few_keys, few_values = attention.expand_kv(latent, shared)
    assert few_keys.shape == (1, 1, 5, 19)
    assert torch.equal(few_values, latent)
    scores = heads.queries(q) @ few_keys.transpose(2, 3)
    assert torch.allclose(scores, q @ keys.transpose(2, 3), rtol=1e-4, atol=1e-4)
    out = heads.values((weights @ few_values).transpose(1, 2))
    assert torch.allclose(out, (weights @ values).transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_it_can_be_prepared_again() -> None:
    made = model()
    prepare_latents(made, PAGED)
    made.config._attn_implementation = PAGED
    prepare_latents(made, PAGED)


def test_another_way_to_expand_is_refused() -> None:
    made = model()
    attention = made.model.layers[1].self_attn
    expand = attention.expand_kv
    attention.expand_kv = lambda latent, shared: tuple(2 * x for x in expand(latent, shared))
    with pytest.raises(ValueError, match="not DeepSeek's"):
        prepare_latents(made, PAGED)
