"""Validation of a checkpoint's files without torch, in launcher and roles: JSON and safetensors headers only.

A safetensors file is

    u64 n | n bytes of JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}} | data

with offsets relative to the start of the data, without gaps or overlaps. The launcher runs this check before
it starts any process, so that a bad checkpoint fails early.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from eaas.checkpoint.formats import StoredMatrix, find_matrices
from eaas.errors import (
    CheckpointError,
    CorruptShardError,
    MissingShardError,
    NotACheckpointError,
)

__all__ = ["CheckpointFiles", "ShardHeader", "TensorEntry", "precheck", "read_files", "read_header"]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
# Bytes of each sampled tensor in the digest.
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's location in a safetensors file, its dtype (safetensors' name) and its shape.

    Attributes:
        offset: First byte in the file.
        nbytes: Size in bytes.
    """

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ShardHeader:
    """The validated header of a safetensors shard.

    Attributes:
        tensors: Tensor name -> entry.
        nbytes: Bytes before the data.
        file_bytes: Size of the file.
        digest: SHA-256 of the bytes before the data.
    """

    tensors: Mapping[str, TensorEntry]
    nbytes: int
    file_bytes: int
    digest: bytes


@dataclass(frozen=True)
class CheckpointFiles:
    """The validated files of a complete checkpoint: config and shard headers.

    Attributes:
        config: Content of config.json.
        headers: Shard -> header.
        tensors: Tensor name -> entry, for all shards.
        matrices: Name of a weight -> how it is stored, for all quantised weights.
    """

    path: Path
    config: Mapping[str, Any]
    headers: Mapping[Path, ShardHeader]
    tensors: Mapping[str, TensorEntry]
    matrices: Mapping[str, StoredMatrix]

    def digest(self, sampled: Collection[str]) -> str:
        """Identify the model: SHA-256 of config.json, names, shapes and dtypes, and samples of tensors.

        The samples distinguish checkpoints of one architecture (a fine-tune from its base) without reading
        hundreds of gigabytes. The digest does not depend on the division into shards.

        Args:
            sampled: Names of the tensors to sample.

        Raises:
            OSError: A shard cannot be read.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, entry in sorted(self.tensors.items()):
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
        samples: dict[str, bytes] = {}
        locations = sorted((self.tensors[n].shard, self.tensors[n].offset, n) for n in sampled)
        for shard, group in groupby(locations, key=lambda location: location[0]):
            with shard.open("rb") as file:
                for _, offset, name in group:
                    file.seek(offset)
                    samples[name] = file.read(min(self.tensors[name].nbytes, _SAMPLE_BYTES))
        for _, sample in sorted(samples.items()):
            digest.update(sample)
        return digest.hexdigest()


def precheck(path: str | os.PathLike[str]) -> None:
    """Check early that a directory has a complete safetensors checkpoint of a known format, without torch.

    Args:
        path: A local directory. Nothing is downloaded.

    Raises:
        NotACheckpointError: No directory, no readable config.json, or no safetensors.
        MissingShardError: The index names a missing shard or tensor.
        CorruptShardError: A shard or the index is truncated or broken.
        UnsupportedModelError: The checkpoint is quantised in a way that is not supported.
        CheckpointError: A file cannot be read.
    """
    read_files(path)


def read_files(path: str | os.PathLike[str]) -> CheckpointFiles:
    """Read config.json, the index and all shard headers of a directory. Raises the errors of `precheck`."""
    try:
        return _read_files(Path(path))
    except OSError as error:
        # save_pretrained writes shards that only their owner can read, a problem in containers.
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror}: let this user read the checkpoint (chmod -R a+rX)"
        ) from error


def _read_files(directory: Path) -> CheckpointFiles:
    config = _read_config(directory)
    weight_map = _read_index(directory)
    headers: dict[Path, ShardHeader] = {}
    tensors: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
        header = headers[directory / shard] = read_header(directory / shard)
        wanted = {name for name, of in weight_map.items() if of == shard} or header.tensors.keys()
        for name in sorted(wanted):
            if name not in header.tensors:
                raise MissingShardError(
                    f"{directory / shard} lacks tensor {name}, which {INDEX} places there: "
                    "complete the download"
                )
            tensors[name] = header.tensors[name]
    matrices = find_matrices(directory / CONFIG, config, tensors)
    return CheckpointFiles(directory, config, headers, tensors, matrices)


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise NotACheckpointError(
            f"{directory} {what}: give the local directory of a downloaded Hugging Face checkpoint"
        )
    file = directory / CONFIG
    if not file.is_file():
        raise NotACheckpointError(
            f"{directory} has no {CONFIG}: give the directory of a Hugging Face checkpoint"
        )
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NotACheckpointError(f"{file} is not JSON ({error}): download it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise NotACheckpointError(f"{file} names no model_type: give a Hugging Face checkpoint")
    return config


def _read_index(directory: Path) -> dict[str, str]:
    """Read the index: tensor name -> name of its shard; empty if the checkpoint is a single file."""
    if (directory / SINGLE).is_file():  # transformers also prefers it to an index
        return {}
    file = directory / INDEX
    if not file.is_file():
        raise _no_safetensors(directory)
    try:
        weight_map = json.loads(file.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptShardError(
            f"{file} is not a safetensors index ({error!r}): download it again"
        ) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptShardError(f"{file} has no weight_map: download it again")
    for name, shard in weight_map.items():
        # An index must not lead out of the directory.
        if not isinstance(shard, str) or not shard or shard != os.path.basename(shard):
            raise CorruptShardError(
                f"{file} places {name} in {shard!r}, which is not a file name: download it again"
            )
        if not shard.endswith(".safetensors"):
            raise NotACheckpointError(f"{file} places {name} in {shard}: only safetensors are read")
        if not (directory / shard).is_file():
            raise MissingShardError(f"{directory / shard} is missing: complete the download")
    return weight_map


def _no_safetensors(directory: Path) -> NotACheckpointError | MissingShardError:
    """Make the error for a directory with neither model.safetensors nor an index."""
    names = sorted(os.listdir(directory))
    if any(name.endswith(".safetensors") for name in names):
        return MissingShardError(
            f"{directory} has safetensors but neither {SINGLE} nor {INDEX}: complete the download"
        )
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        return NotACheckpointError(
            f"{directory} has only pickles ({pickles[0]}), which can run code and are refused: "
            "convert it if you trust it (save_pretrained of transformers writes safetensors)"
        )
    return NotACheckpointError(f"{directory} has no {SINGLE} and no {INDEX}: complete the download")


def read_header(shard: Path) -> ShardHeader:
    """Read a safetensors shard's header, and check that it matches the file; the data is not read.

    Raises:
        CorruptShardError: The header is malformed or does not match the file.
        OSError: The file cannot be read.
    """

    def corrupt(what: str) -> CorruptShardError:
        return CorruptShardError(f"{shard}: {what}: download the shard again")

    with shard.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise corrupt(f"{size} bytes are not a safetensors file")
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise corrupt(f"header of {length} bytes in a file of {size}")
        try:
            text = file.read(length)
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise corrupt(f"header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise corrupt("header is not a JSON object")
    header.pop("__metadata__", None)

    data_bytes = size - 8 - length
    entries: dict[str, TensorEntry] = {}
    places: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        try:
            dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
            bits = _BITS[dtype] * math.prod(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise corrupt(f"tensor {name} has an invalid entry ({error!r})") from error
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise corrupt(f"tensor {name} has shape {shape}, offsets {begin}..{end}")
        if bits != 8 * (end - begin):
            raise corrupt(f"tensor {name} ({dtype} {shape}) does not fit offsets {begin}..{end}")
        if end > data_bytes:
            raise corrupt(f"tensor {name} ends at byte {end} of {data_bytes} (truncated)")
        entries[name] = TensorEntry(
            shard, dtype, tuple(shape), size - data_bytes + begin, end - begin
        )
        places.append((begin, end, name))

    position = 0
    for begin, end, name in sorted(places):
        if begin != position:
            raise corrupt(f"tensor {name} begins at byte {begin}, not {position}")
        position = end
    if position != data_bytes:
        raise corrupt(f"{data_bytes - position} bytes belong to no tensor")
    return ShardHeader(entries, 8 + length, size, hashlib.sha256(prefix + text).digest())
