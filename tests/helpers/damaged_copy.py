"""Copies of checkpoints with single bits flipped in chosen tensors."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from eaas.checkpoint import Checkpoint
from eaas_cli.chaos.faults import flip


def expert_keys(model: Path, layer: int | None = None) -> list[str]:
    """One tensor of each expert, or the first of those that hold all experts of a layer."""
    tensors = Checkpoint.open(model).expert_tensors
    return list({(t.layer, t.expert): t.key for t in tensors if layer in (None, t.layer)}.values())


def damaged_copy(model: Path, copy: Path, keys: Iterable[str]) -> Path:
    """Copy a checkpoint and flip one bit in each of these tensors."""
    shutil.copytree(model, copy)
    damage(copy, keys)
    return copy


def damage(model: Path, keys: Iterable[str]) -> None:
    """Flip one bit in each of these tensors, in place; in each row if a tensor holds all experts."""
    checkpoint = Checkpoint.open(model)
    experts = checkpoint.shape.num_experts
    for key in keys:
        tensor = checkpoint.slice(key)
        is_of_all = tensor.shape[:1] == (experts,)
        for part in [tensor.row(e) for e in range(experts)] if is_of_all else [tensor]:
            flip(part, part.nbytes // 2, 7)
    checkpoint.release()
