"""Validation of a checkpoint's files without torch, in launcher and roles: JSON and safetensors headers only.

The launcher runs this check before it starts any process, so that a bad checkpoint fails early.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from eaas.checkpoint.config_file import check_config
from eaas.checkpoint.formats import StoredMatrix, find_matrices
from eaas.checkpoint.header import ShardHeader, TensorEntry, read_header
from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.source import CONFIG, INDEX, NO_GGUF, SINGLE, Source
from eaas.checkpoint.text_files import read_object, read_optional
from eaas.checkpoint.tokenizer_files import check_client_files
from eaas.errors import (
    CheckpointError,
    CorruptShardError,
    DenseModelError,
    MissingShardError,
    NotACheckpointError,
)
from eaas.hub_cache import complete_download

__all__ = ["CheckpointFiles", "dense", "precheck", "read_config", "read_files"]

# Bytes of each sampled tensor in the digest.
_SAMPLE_BYTES = 4096
# Of a model with experts, the config has a count in a field of such a name, and mostly the tensors have one.
_OF_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


@dataclass(frozen=True)
class CheckpointFiles:
    """The validated files of a complete checkpoint: config and shard headers.

    Attributes:
        source: Where the files are.
        config: Content of config.json, with the section of a side file that tells the format.
        headers: Name of a shard -> header.
        tensors: Tensor name -> entry, for all shards.
        matrices: Name of a weight -> how it is stored, for all quantised weights.
    """

    source: Source
    config: Mapping[str, Any]
    headers: Mapping[str, ShardHeader]
    tensors: Mapping[str, TensorEntry]
    matrices: Mapping[str, StoredMatrix]

    def digest(self, sampled: Collection[str]) -> str:
        """Identify the model: SHA-256 of config.json, names, shapes and dtypes, and samples of tensors.

        The samples distinguish checkpoints of one architecture (a fine-tune from its base) without reading
        hundreds of gigabytes. The digest does not depend on the division into shards.

        Args:
            sampled: Names of the tensors to sample.

        Raises:
            CheckpointError: A shard cannot be read.
            OSError: A local one cannot be read.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, entry in sorted(self.tensors.items()):
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        for sample in self.source.each(self._sample, sorted(sampled)):
            digest.update(sample)
        return digest.hexdigest()

    def _sample(self, name: str) -> bytearray:
        entry = self.tensors[name]
        sample = bytearray(min(entry.nbytes, _SAMPLE_BYTES))
        try:
            self.source.read(entry.shard, entry.offset, memoryview(sample))
        except ValueError as error:
            raise CorruptShardError(
                f"{self.source.place(entry.shard)}: tensor {name} cannot be read ({error}): "
                "download the shard again"
            ) from error
        return sample


def precheck(path: str | os.PathLike[str], *, tokenizer: bool = False) -> CheckpointFiles:
    """Check early that a directory has a complete safetensors checkpoint of a known format, without torch.

    Args:
        path: A local directory, or a name in the cache of huggingface_hub. Nothing is downloaded.
        tokenizer: Whether to check the files that only attention clients read, too.

    Returns:
        Its files, with all headers.

    Raises:
        NotACheckpointError: No directory, no readable config.json, no safetensors, or no vocabulary.
        MissingShardError: The index names a missing shard or tensor.
        CorruptShardError: A shard or the index is truncated or broken.
        DenseModelError: Neither config nor tensors speak of experts, or there is a single expert or none.
        UnsupportedModelError: The checkpoint is quantised in a way that is not supported, or transformers
            does not know its architecture.
        CheckpointError: A file cannot be read, or the tensors do not fit the config's counts.
    """
    return read_files(path, tokenizer)


def dense(source: Source, model_type: str) -> DenseModelError:
    """Make the error for a model without experts."""
    return DenseModelError(
        f"{source.place(CONFIG)}: {model_type} with this config has no layer with experts: "
        "serve it with another engine"
    )


def read_files(source: str | os.PathLike[str] | Source, tokenizer: bool = False) -> CheckpointFiles:
    """Read config.json, the index and all shard headers of a checkpoint. Raises the errors of `precheck`."""
    try:
        opened = LocalSource(source) if isinstance(source, (str, os.PathLike)) else source
        files = _read_files(opened)
        if tokenizer:
            assert isinstance(opened, LocalSource)
            check_client_files(opened)
        return files
    except OSError as error:
        raise _unreadable(error, source) from error


def _unreadable(error: OSError, source: object) -> CheckpointError:
    # save_pretrained writes shards that only their owner can read, a problem in containers.
    return CheckpointError(
        f"{error.filename or source}: {error.strerror}: let this user read the checkpoint (chmod -R a+rX)"
    )


def _read_files(source: Source) -> CheckpointFiles:
    config = read_config(source)
    weight_map = _read_index(source)
    shards = sorted(set(weight_map.values())) if weight_map else [SINGLE]
    headers = dict(zip(shards, source.each(partial(read_header, source), shards), strict=True))
    # A single file holds what its header says.
    places = weight_map or dict.fromkeys(headers[shards[0]].tensors, shards[0])
    tensors: dict[str, TensorEntry] = {}
    for name, shard in sorted(places.items(), key=lambda item: item[::-1]):
        if name not in headers[shard].tensors:
            raise MissingShardError(
                f"{source.place(shard)} lacks tensor {name}, which {INDEX} places there: "
                f"{complete_download(str(source))}"
            )
        tensors[name] = headers[shard].tensors[name]
    model_type = config["model_type"]
    if not _counts_experts(config) and not any(map(_OF_EXPERTS.search, (model_type, *tensors))):
        raise dense(source, model_type)
    check_config(source.place(CONFIG), config, tensors)
    matrices, described = find_matrices(
        source.place, partial(read_optional, source), config, tensors
    )
    return CheckpointFiles(source, described, headers, tensors, matrices)


def read_config(source: Source) -> dict[str, Any]:
    """Read a checkpoint's config.json. Raises NotACheckpointError: there is none, or it names no model."""
    config = read_object(source, CONFIG, NotACheckpointError)
    if config is None:
        raise _no_config(source)
    if not config.get("model_type") or not isinstance(config["model_type"], str):
        raise NotACheckpointError(
            f"{source.place(CONFIG)} names no model_type: give a Hugging Face checkpoint"
        )
    return config


def _read_index(source: Source) -> dict[str, str]:
    """Read the index: tensor name -> name of its shard; empty if the checkpoint is a single file."""
    if source.size(SINGLE) is not None:  # transformers also prefers it to an index
        return {}
    index = read_object(source, INDEX, CorruptShardError)
    if index is None:
        raise _no_safetensors(source)
    place, weight_map = source.place(INDEX), index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptShardError(f"{place} has no weight_map: download it again")
    for name, shard in weight_map.items():
        # An index must not lead out of the directory.
        if not isinstance(shard, str) or not shard or shard != os.path.basename(shard):
            raise CorruptShardError(
                f"{place} places {name} in {shard!r}, which is not a file name: download it again"
            )
        if not shard.endswith(".safetensors"):
            raise NotACheckpointError(
                f"{place} places {name} in {shard}: only safetensors are read"
            )
    return weight_map


def _counts_experts(config: dict[str, Any]) -> bool:
    """Whether a config or a part of it has a number above 1, or a list with one, in a field for experts."""
    parts = [config]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            # Some configs have a number for each layer.
            numbers = value if isinstance(value, list) else [value]
            if _OF_EXPERTS.search(name) and any(
                isinstance(n, int | float) and n > 1 for n in numbers
            ):
                return True
    return False


def _no_config(source: Source) -> NotACheckpointError:
    """Make the error for a directory without config.json."""
    names = source.names()
    if models := [source.place(name) for name in names if name.startswith("models--")]:
        return NotACheckpointError(
            f"{source} is the cache of huggingface_hub: give a model in it: {', '.join(models)}"
        )
    if any(name.endswith(".gguf") for name in names):
        return NotACheckpointError(f"{source} has only GGUF: {NO_GGUF}")
    if "adapter_config.json" in names:
        return NotACheckpointError(
            f"{source} is an adapter without its model: merge the two (merge_and_unload of peft, "
            "save_pretrained), and give the result"
        )
    return NotACheckpointError(
        f"{source} has no {CONFIG}: give the directory of a Hugging Face checkpoint"
    )


def _no_safetensors(source: Source) -> NotACheckpointError | MissingShardError:
    """Make the error for a directory with neither model.safetensors nor an index."""
    names = source.names()
    if any(name.endswith(".gguf") for name in names):
        return NotACheckpointError(f"{source} has only GGUF: {NO_GGUF}")
    if any(name.endswith(".safetensors") for name in names):
        return MissingShardError(
            f"{source} has safetensors but neither {SINGLE} nor {INDEX}: {complete_download(str(source))}"
        )
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        return NotACheckpointError(
            f"{source} has only pickles ({pickles[0]}), which can run code and are refused: "
            "convert it if you trust it (save_pretrained of transformers writes safetensors)"
        )
    return NotACheckpointError(
        f"{source} has no {SINGLE} and no {INDEX}: {complete_download(str(source))}"
    )
