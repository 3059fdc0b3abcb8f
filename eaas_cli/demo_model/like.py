"""Writes a checkpoint with the shapes and the storage format of a published model, and random weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from eaas.checkpoint.quiet import quiet_transformers
from eaas.errors import ConfigError
from eaas.garbage_collection import collector_off
from eaas_cli.demo_model.layout import plan_tensors
from eaas_cli.demo_model.published import published_config
from eaas_cli.demo_model.target import MARK, refuse_to_overwrite, replacing
from eaas_cli.demo_model.tokenizer import BOS_ID, PAD_ID, build_tokenizer, end_ids, word_ids

__all__ = ["write_checkpoint", "write_model_like"]

_MAX_SHARD_BYTES = 4_000_000_000
_MAX_TOKENS = 2000  # in the tokenizer; the embedding has the published number of rows
_MEGABYTE = 1_000_000


def write_model_like(
    path: str | os.PathLike[str],
    name: str,
    *,
    layers: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda wrote, total: None,
) -> None:
    """Write a random checkpoint like a published one: config, safetensors shards, tokenizer.

    The same arguments give the same bytes, and fewer layers the same first layers. The directory appears in
    one step and replaces an earlier demo model.

    Args:
        path: New directory.
        name: One of `PUBLISHED`.
        layers: Take only the first decoder layers. None: all.
        progress: Is called with the number of bytes that were just written, and of all bytes.

    Raises:
        ConfigError: An argument is wrong, or the path cannot be written or holds something else.
    """
    if seed < 0:
        raise ConfigError(f"seed {seed}: choose 0 or more")
    config = published_config(name, layers)
    mark = {"like": name, "layers": config["num_hidden_layers"], "seed": seed}
    write_checkpoint(path, config, mark, seed=seed, progress=progress)


def write_checkpoint(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    mark: Mapping[str, Any],
    *,
    seed: int,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda wrote, total: None,
) -> None:
    """Write the checkpoint that a config.json describes. Arguments and errors as `write_model_like`.

    Args:
        config: Content of config.json.
        mark: Content of the file that marks a demo model.
        max_shard_bytes: Bytes of a shard.
    """
    target = Path(path)
    refuse_to_overwrite(target)
    plans = list(plan_tensors(dict(config)))
    total = sum(plan.nbytes for plan in plans)
    with collector_off(), replacing(target) as directory:
        free = shutil.disk_usage(directory).free
        if total > free:
            raise ConfigError(
                f"path {target}: {_size(total)} do not fit on a disk with {_size(free)} free: "
                "choose another disk or fewer layers"
            )
        from transformers import GenerationConfig

        from eaas_cli.demo_model.random_tensors import draw_tensor
        from eaas_cli.demo_model.shards import write_shards

        try:
            with quiet_transformers():
                vocab = min(config["vocab_size"], _MAX_TOKENS)
                arch = config["model_type"]
                tokenizer = build_tokenizer(vocab, config["max_position_embeddings"], arch)
                tokenizer.save_pretrained(directory, save_jinja_files=False)
                GenerationConfig(
                    do_sample=False,
                    bos_token_id=BOS_ID,
                    eos_token_id=end_ids(tokenizer, arch),
                    pad_token_id=PAD_ID,
                ).save_pretrained(directory)
            write_shards(
                directory,
                plans,
                partial(draw_tensor, seed=seed, words=word_ids(tokenizer)),
                max_shard_bytes=max_shard_bytes,
                wrote=lambda wrote: progress(wrote, total),
            )
            (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (directory / MARK).write_text(json.dumps(mark, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"path {target} cannot be written: {error.strerror}: free some space or choose another path"
            ) from error


def _size(nbytes: int) -> str:
    return f"{max(1, nbytes // _MEGABYTE):,} MB"
