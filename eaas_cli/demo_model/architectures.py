"""transformers' configs of the demo models, derived from a few sizes (`eaas demo-model`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eaas.errors import ConfigError
from eaas_cli.demo_model.tokenizer import BOS_ID, EOS_ID, MIN_VOCAB, PAD_ID

__all__ = ["ARCHITECTURES", "MAX_POSITIONS", "DemoSizes", "build_config"]

ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
MAX_POSITIONS = 4096

_DTYPES = ("float32", "bfloat16", "float16")
_HEADS = 4


@dataclass(frozen=True)
class DemoSizes:
    """The arguments of `write_demo_model`, checked. Raises ConfigError for a wrong one."""

    arch: str
    layers: int
    hidden: int
    experts: int
    top_k: int
    vocab: int
    seed: int
    dtype: str

    def __post_init__(self) -> None:
        layers = 2 if self.arch == "deepseek_v3" else 1  # its first layer is dense
        for is_right, what in (
            (
                self.arch in ARCHITECTURES,
                f"arch {self.arch!r} is unknown: choose one of {', '.join(ARCHITECTURES)}",
            ),
            (
                self.dtype in _DTYPES,
                f"dtype {self.dtype!r} is unknown: choose one of {', '.join(_DTYPES)}",
            ),
            (self.layers >= layers, f"layers {self.layers}: {self.arch} needs {layers} or more"),
            (
                self.hidden >= 32 and self.hidden % 16 == 0,
                f"hidden {self.hidden}: choose a multiple of 16, at least 32",
            ),
            (self.experts >= 2, f"experts {self.experts}: choose 2 or more"),
            (
                1 <= self.top_k <= self.experts,
                f"top_k {self.top_k}: choose 1 to {self.experts} (the number of experts)",
            ),
            (self.vocab >= MIN_VOCAB, f"vocab {self.vocab}: choose {MIN_VOCAB} or more"),
            (self.seed >= 0, f"seed {self.seed}: choose 0 or more"),
        ):
            if not is_right:
                raise ConfigError(what)


def build_config(sizes: DemoSizes) -> Any:
    """Build transformers' config of a demo model. Experts are half as wide as the hidden states."""
    from transformers import AutoConfig

    hidden, experts, width = sizes.hidden, sizes.experts, sizes.hidden // 2
    head_dim = hidden // _HEADS
    groups = next(g for g in (4, 2, 1) if g == 1 or (experts % g == 0 and experts >= 2 * g))
    own: dict[str, dict[str, Any]] = {
        "qwen3_moe": {
            "num_experts": experts,
            "head_dim": head_dim,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
        },
        "qwen2_moe": {
            "num_experts": experts,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": hidden,
        },
        "mixtral": {
            "num_local_experts": experts,
            "head_dim": head_dim,
            "intermediate_size": width,
        },
        "olmoe": {"num_experts": experts, "intermediate_size": width},
        "deepseek_v3": {
            "n_routed_experts": experts,
            "n_shared_experts": 1,
            # As published checkpoints have them; other engines read them.
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "first_k_dense_replace": 1,
            "intermediate_size": 2 * hidden,
            "moe_intermediate_size": width,
            # Half of the groups, or as many as top_k experts need.
            "n_group": groups,
            "topk_group": max(1, groups // 2, -(-sizes.top_k // (experts // groups))),
            "q_lora_rank": hidden // 2,
            # The published sizes: vLLM's latent attention on CPUs has no others.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": head_dim,
            "v_head_dim": head_dim,
        },
        "gpt_oss": {
            "num_local_experts": experts,
            "head_dim": head_dim,
            "intermediate_size": width,
            "sliding_window": 128,
        },
    }
    return AutoConfig.for_model(
        sizes.arch,
        vocab_size=sizes.vocab,
        hidden_size=hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS if sizes.arch == "deepseek_v3" else _HEADS // 2,
        num_experts_per_tok=sizes.top_k,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=False,
        **own[sizes.arch],
    )
