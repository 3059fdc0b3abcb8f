"""Makes a checkpoint of a given size with meaningless weights, for servers to load."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eaas.checkpoint import quiet_transformers
from eaas_cli.demo_model.architectures import DemoSizes, build_config

__all__ = ["write_checkpoint"]

_LAYERS, _HIDDEN, _TOP_K, _VOCAB = 8, 1024, 4, 1000
# Bytes of an expert: gate, up and down, each H x H/2, in bfloat16.
_EXPERT_BYTES = 3 * _HIDDEN * (_HIDDEN // 2) * 2
_BLOCK = 1 << 20


def write_checkpoint(path: Path, expert_bytes: int) -> int:
    """Write a qwen3_moe with about `expert_bytes` of experts to a new directory; return their exact size."""
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
