"""Copies of a checkpoint in which single bits are flipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from eaas.checkpoint import Checkpoint


def expert_keys(model: Path, layer: int | None = None) -> list[str]:
    """One tensor of each expert, or the first of those that hold all experts of a layer."""
    tensors = Checkpoint.open(model).expert_tensors
    return list({(t.layer, t.expert): t.key for t in tensors if layer in (None, t.layer)}.values())


def damaged_copy(model: Path, copy: Path, keys: Iterable[str]) -> Path:
    """A copy with one bit flipped in each of these tensors."""
    shutil.copytree(model, copy)
    damage(copy, keys)
    return copy


def damage(model: Path, keys: Iterable[str]) -> None:
    """Flips one bit in each of these tensors, in place."""
    checkpoint = Checkpoint.open(model)
    for key in keys:
        tensor = checkpoint.slice(key)
        # One tensor of a whole layer: each expert's row of it.
        rows = tensor.shape[0] if tensor.shape[:1] == (checkpoint.shape.num_experts,) else 1
        with tensor.shard.path.open("r+b") as file:
            for row in range(rows):
                at = tensor.offset + (2 * row + 1) * tensor.nbytes // (2 * rows)
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 0x80]))
    checkpoint.release()
