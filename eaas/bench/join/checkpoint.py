"""A checkpoint of a wanted size. What its weights are does not matter: they are only moved."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eaas.checkpoint import quiet_transformers
from eaas.demo_model.architectures import DemoSizes, build_config

__all__ = ["write_checkpoint"]

_LAYERS, _HIDDEN, _TOP_K, _VOCAB = 8, 1024, 4, 1000
# Gate, up and down, each hidden by half of that, in bfloat16.
_EXPERT_BYTES = 3 * _HIDDEN * (_HIDDEN // 2) * 2
_BLOCK = 1 << 20


def write_checkpoint(path: Path, expert_bytes: int) -> int:
    """Writes a qwen3_moe whose experts are about so large, all together.

    Args:
        path: Directory to make.
        expert_bytes: Of all experts.

    Returns:
        What they are in truth.
    """
    experts = max(2 * _TOP_K, round(expert_bytes / (_LAYERS * _EXPERT_BYTES)))
    sizes = DemoSizes("qwen3_moe", _LAYERS, _HIDDEN, experts, _TOP_K, _VOCAB, 0, "bfloat16")
    with quiet_transformers():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(build_config(sizes), dtype=torch.bfloat16)
        model = model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        block = torch.empty(_BLOCK, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for parameter in model.parameters():
            for part in parameter.data.view(-1).split(_BLOCK):
                part.copy_(block[: len(part)])
        model.save_pretrained(path, max_shard_size="200MB")
    return experts * _LAYERS * _EXPERT_BYTES
