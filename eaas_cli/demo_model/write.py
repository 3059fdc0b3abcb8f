"""Writes demo models and random models like published ones as ordinary checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from eaas.checkpoint.quiet import quiet_transformers
from eaas.errors import ConfigError
from eaas.garbage_collection import collector_off
from eaas_cli.demo_model.architectures import MAX_POSITIONS, DemoSizes, build_config
from eaas_cli.demo_model.layout import plan_tensors
from eaas_cli.demo_model.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    build_tokenizer,
    end_ids,
    weak_ids,
    word_ids,
)

__all__ = [
    "PUBLISHED",
    "published_config",
    "write_checkpoint",
    "write_demo_model",
    "write_model_like",
]

_MARK = "demo_model.json"
_MAX_SHARD_BYTES = 4_000_000_000
_MAX_TOKENS = 2000  # in the tokenizer; the embedding has the published number of rows
_MEGABYTE = 1_000_000

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (files(__package__) / "published.json").read_text("utf-8")
)
"""Facts of published models' config.json, as their makers give them (`eaas demo-model --like`).

Left out: fields that only training or remote code reads. The ids of special tokens are those of the demo
models' tokenizer, which takes the place of the published one. The makers of Kimi-K2 write model_type
"kimi_k2", for remote code that is DeepSeek-V3's; transformers has no such type.
"""


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
    # Creating a model imports its modules from transformers.
    with collector_off(), _replacing(Path(path), asdict(sizes)) as directory, quiet_transformers():
        import torch
        from transformers import AutoModelForCausalLM

        from eaas_cli.demo_model.weights import fill_weights

        with torch.random.fork_rng(devices=[]):
            tokenizer = build_tokenizer(vocab, MAX_POSITIONS, arch)
            # Step 2 of `fill_weights` runs in float64, which only the eager experts support.
            model = AutoModelForCausalLM.from_config(
                build_config(sizes), dtype=torch.float32, experts_implementation="eager"
            ).eval()
            fill_weights(model, word_ids(tokenizer), weak_ids(tokenizer), seed)
            model.generation_config = _generation_config(tokenizer, arch)
            stored = model.to(getattr(torch, dtype))
            stored.save_pretrained(directory, max_shard_size=max_shard_size)
            tokenizer.save_pretrained(directory, save_jinja_files=False)


def published_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """Return the config.json of a published model.

    Args:
        layers: Take only the first decoder layers, without layers that predict further tokens. None: all.

    Raises:
        ConfigError: The name is unknown, or the model has not so many layers, or those have no experts.
    """
    if name not in PUBLISHED:
        raise ConfigError(f"like {name!r} is unknown: choose one of {', '.join(PUBLISHED)}")
    config = deepcopy(PUBLISHED[name])
    if layers is not None:
        least, most = config.get("first_k_dense_replace", 0) + 1, config["num_hidden_layers"]
        if not least <= layers <= most:
            raise ConfigError(f"layers {layers}: choose {least} to {most} for {name}")
        if layers < most:
            config |= {"num_hidden_layers": layers} | dict.fromkeys(
                config.keys() & {"num_nextn_predict_layers"}, 0
            )
    config |= {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    # The lists with entries for each layer.
    each = range(config["num_hidden_layers"])
    if config["model_type"] == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in each]
    if config["model_type"] == "qwen3_moe" and "quantization_config" in config:
        config["quantization_config"]["modules_to_not_convert"] = ["lm_head"] + [
            f"model.layers.{layer}.{part}"
            for layer in each
            for part in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        ]
    return config


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
    plans = list(plan_tensors(config))
    total, arch = sum(plan.nbytes for plan in plans), config["model_type"]
    with collector_off(), _replacing(Path(path), mark) as directory:
        free = shutil.disk_usage(directory).free
        if total > free:
            raise ConfigError(
                f"path {path}: {_size(total)} do not fit on a disk with {_size(free)} free: "
                "choose another disk or fewer layers"
            )
        from eaas_cli.demo_model.random_tensors import draw_tensor
        from eaas_cli.demo_model.shards import write_shards

        with quiet_transformers():
            vocab = min(config["vocab_size"], _MAX_TOKENS)
            tokenizer = build_tokenizer(vocab, config["max_position_embeddings"], arch)
            tokenizer.save_pretrained(directory, save_jinja_files=False)
            _generation_config(tokenizer, arch).save_pretrained(directory)
        write_shards(
            directory,
            plans,
            partial(draw_tensor, seed=seed, words=word_ids(tokenizer)),
            max_shard_bytes=max_shard_bytes,
            on_bytes=lambda wrote: progress(wrote, total),
        )
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _generation_config(tokenizer: Any, arch: str) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=False,
        bos_token_id=BOS_ID,
        eos_token_id=end_ids(tokenizer, arch),
        pad_token_id=PAD_ID,
    )


@contextmanager
def _replacing(target: Path, mark: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a new directory; it replaces the target at the end, or is deleted on an error.

    `mark`: content of the file that marks a demo model. Raises ConfigError: the target is neither an empty
    directory nor a demo model, or cannot be written.
    """
    if target.exists() and not target.is_dir():
        raise ConfigError(f"path {target} is a file: choose another path")
    if target.exists() and any(target.iterdir()) and not (target / _MARK).is_file():
        raise ConfigError(
            f"path {target} holds something other than a demo model: choose another path"
        )
    path = target.absolute()
    new, old = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("new", "old"))
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"path {path} cannot be written: {error}") from error
    try:
        yield new
        (new / _MARK).write_text(json.dumps(mark, indent=2) + "\n")
        if path.exists():
            path.rename(old)
            new.rename(path)
            shutil.rmtree(old)
        else:
            new.rename(path)
    except OSError as error:
        raise ConfigError(
            f"path {target} cannot be written: {error.strerror}: free some space or choose another path"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _size(nbytes: int) -> str:
    return f"{max(1, nbytes // _MEGABYTE):,} MB"
