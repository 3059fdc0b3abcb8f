"""Writes a demo model as an ordinary checkpoint, for `eaas demo-model`, benchmarks, chaos runs and tests."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

from eaas.checkpoint.quiet import quiet_transformers
from eaas.garbage_collection import collector_off
from eaas_cli.demo_model.architectures import MAX_POSITIONS, DemoSizes, build_config
from eaas_cli.demo_model.target import MARK, refuse_to_overwrite, replacing
from eaas_cli.demo_model.tokenizer import (
    BOS_ID,
    PAD_ID,
    build_tokenizer,
    end_ids,
    weak_ids,
    word_ids,
)

__all__ = ["write_demo_model"]


def write_demo_model(
    path: str | os.PathLike[str],
    arch: str = "qwen3_moe",
    *,
    layers: int = 4,
    hidden: int = 128,
    experts: int = 16,
    top_k: int = 4,
    vocab: int = 1000,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: int | str = "1MB",
) -> None:
    """Write a small random checkpoint: config, safetensors shards, tokenizer, generation config.

    The same arguments give the same bytes. The directory appears in one step and replaces an earlier demo
    model.

    Args:
        path: New directory.
        arch: One of `ARCHITECTURES`.
        layers: Decoder layers; the first one of deepseek_v3 is dense.
        hidden: Hidden size H, a multiple of 16.
        experts: Logical experts per layer E.
        top_k: Experts per token K.
        vocab: Size of the embedding; the tokenizer has at most as many tokens.
        dtype: "float32", "bfloat16" or "float16".
        max_shard_size: Bytes of a shard, as `save_pretrained` takes it ("1MB").

    Raises:
        ConfigError: An argument is wrong, or the path holds something else.
    """
    sizes = DemoSizes(arch, layers, hidden, experts, top_k, vocab, seed, dtype)
    target = Path(path)
    refuse_to_overwrite(target)

    with ExitStack() as stack:
        # Creating a model imports its modules from transformers.
        stack.enter_context(collector_off())
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        from eaas_cli.demo_model.weights import fill_weights

        directory = stack.enter_context(replacing(target))
        stack.enter_context(quiet_transformers())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        tokenizer = build_tokenizer(vocab, MAX_POSITIONS, arch)
        # Step 2 of `fill_weights` runs in float64, which only the eager experts support.
        model = AutoModelForCausalLM.from_config(
            build_config(sizes), dtype=torch.float32, experts_implementation="eager"
        ).eval()
        fill_weights(model, word_ids(tokenizer), weak_ids(tokenizer), seed)
        model.generation_config = GenerationConfig(
            do_sample=False,
            bos_token_id=BOS_ID,
            eos_token_id=end_ids(tokenizer, arch),
            pad_token_id=PAD_ID,
        )
        model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
        tokenizer.save_pretrained(directory, save_jinja_files=False)
        (directory / MARK).write_text(json.dumps(sizes.to_dict(), indent=2) + "\n")
