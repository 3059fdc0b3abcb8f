"""Writes safetensors shards and their index piece by piece: memory holds no whole tensor.

`eaas.checkpoint.files` describes the format. Tensors with large elements come first, as safetensors itself
orders them, so that each tensor is aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from eaas_cli.demo_model.layout import TensorPlan
from eaas_cli.demo_model.random_tensors import Array

__all__ = ["write_shards"]


def write_shards(
    directory: Path,
    plans: Iterable[TensorPlan],
    draw: Callable[[TensorPlan], Iterable[Array]],
    *,
    max_shard_bytes: int,
    on_bytes: Callable[[int], None],
) -> None:
    """Write tensors as model-00001-of-N.safetensors and so on, and then the index, for `eaas demo-model`.

    Args:
        directory: Exists already.
        draw: Yields a tensor's bytes in pieces, of as many bytes as its plan says.
        max_shard_bytes: Begin another shard rather than exceed it. A larger tensor has a shard of its own.
        on_bytes: Called with the number of bytes of each piece, for the progress.

    Raises:
        OSError: A file cannot be written.
    """
    shards = list(_split(plans, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = directory / f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard = sorted(shard, key=lambda plan: (-plan.item_bytes, plan.name))
        with file.open("wb", buffering=0) as out:
            out.write(_header(shard))
            for plan in shard:
                for piece in draw(plan):
                    _write_all(out.write, piece.data.cast("B"))
                    on_bytes(piece.nbytes)
        weight_map |= dict.fromkeys((plan.name for plan in shard), file.name)
    total = sum(plan.nbytes for shard in shards for plan in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (directory / "model.safetensors.index.json").write_text(text)


def _split(plans: Iterable[TensorPlan], max_bytes: int) -> Iterator[list[TensorPlan]]:
    shard: list[TensorPlan] = []
    size = 0
    for plan in plans:
        if shard and size + plan.nbytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(plan)
        size += plan.nbytes
    yield shard


def _header(plans: Sequence[TensorPlan]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for plan in plans:
        end = begin + plan.nbytes
        fields[plan.name] = {
            "dtype": plan.dtype,
            "shape": plan.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_all(write: Callable[[memoryview], int | None], data: memoryview) -> None:
    """Write everything. A raw file takes at most 2 GiB at a time, and less on a nearly full disk."""
    while data:
        data = data[write(data) or 0 :]
