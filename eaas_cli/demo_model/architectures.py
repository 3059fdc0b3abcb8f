"""transformers' configs of the demo models, derived from a few sizes (`eaas demo-model`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
        if self.arch not in ARCHITECTURES:
            raise ConfigError(
                f"arch {self.arch!r} is unknown: choose one of {', '.join(ARCHITECTURES)}"
            )
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is unknown: choose one of {', '.join(_DTYPES)}"
            )
        least_layers = 2 if self.arch == "deepseek_v3" else 1  # its first layer is dense
        if self.layers < least_layers:
            raise ConfigError(f"layers {self.layers}: {self.arch} needs {least_layers} or more")
        if self.hidden < 32 or self.hidden % 16:
            raise ConfigError(f"hidden {self.hidden}: choose a multiple of 16, at least 32")
        if self.experts < 2:
            raise ConfigError(f"experts {self.experts}: choose 2 or more")
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(
                f"top_k {self.top_k}: choose 1 to {self.experts} (the number of experts)"
            )
        if self.vocab < MIN_VOCAB:
            raise ConfigError(f"vocab {self.vocab}: choose {MIN_VOCAB} or more")
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed}: choose 0 or more")

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary of the arguments by name, for the file that marks a demo model."""
        return asdict(self)


def build_config(sizes: DemoSizes) -> Any:
    """Build transformers' config of a demo model. Experts are half as wide as the hidden states."""
    from transformers import AutoConfig

    head_dim, intermediate = sizes.hidden // _HEADS, sizes.hidden // 2
    common = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS if sizes.arch == "deepseek_v3" else _HEADS // 2,
        "num_experts_per_tok": sizes.top_k,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,
    }
    own: dict[str, Any]
    match sizes.arch:
        case "qwen3_moe":
            own = {
                "num_experts": sizes.experts,
                "head_dim": head_dim,
                "intermediate_size": 2 * sizes.hidden,
                "moe_intermediate_size": intermediate,
                "norm_topk_prob": True,
            }
        case "qwen2_moe":
            own = {
                "num_experts": sizes.experts,
                "intermediate_size": 2 * sizes.hidden,
                "moe_intermediate_size": intermediate,
                "shared_expert_intermediate_size": sizes.hidden,
            }
        case "mixtral":
            own = {
                "num_local_experts": sizes.experts,
                "head_dim": head_dim,
                "intermediate_size": intermediate,
            }
        case "olmoe":
            own = {"num_experts": sizes.experts, "intermediate_size": intermediate}
        case "deepseek_v3":
            groups = next(g for g in (4, 2, 1) if sizes.experts % g == 0 and sizes.experts >= 2 * g)
            in_group = sizes.experts // groups
            own = {
                "n_routed_experts": sizes.experts,
                "n_shared_experts": 1,
                # As published checkpoints have them; other engines read them.
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "first_k_dense_replace": 1,
                "intermediate_size": 2 * sizes.hidden,
                "moe_intermediate_size": intermediate,
                # Half of the groups, or as many as top_k experts need.
                "n_group": groups,
                "topk_group": max(1, groups // 2, -(-sizes.top_k // in_group)),
                "q_lora_rank": sizes.hidden // 2,
                # The published sizes: vLLM's latent attention on CPUs has no others.
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": head_dim,
                "v_head_dim": head_dim,
            }
        case _:
            own = {
                "num_local_experts": sizes.experts,
                "head_dim": head_dim,
                "intermediate_size": intermediate,
                "sliding_window": 128,
            }
    return AutoConfig.for_model(sizes.arch, **common, **own)
