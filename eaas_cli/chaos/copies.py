"""The chaos fault "damaged": damaged copies of a checkpoint, which a server must refuse to serve."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from pathlib import Path

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.quantized_slice import QuantizedSlice
from eaas.checkpoint.shard import TensorSlice

__all__ = ["damaged_copy", "flip"]


def damaged_copy(model: Path, copy: Path, dice: random.Random) -> None:
    """Copy a checkpoint and flip one bit of each of its experts.

    `dice`: draws the tensor, the byte and the bit.
    """
    shutil.copytree(model, copy)
    checkpoint = Checkpoint.open(copy)
    parts: dict[tuple[int, int], list[TensorSlice]] = defaultdict(list)
    for tensor in checkpoint.expert_tensors:
        whole = checkpoint.slice(tensor.key)
        if tensor.expert is not None:
            parts[tensor.layer, tensor.expert] += _stored(whole)
            continue
        for expert in range(checkpoint.shape.num_experts):
            parts[tensor.layer, expert] += _stored(whole.row(expert))
    for of_expert in parts.values():
        part = dice.choice(of_expert)
        flip(part, dice.randrange(part.nbytes), dice.randrange(8))
    checkpoint.release()


def _stored(weight: TensorSlice | QuantizedSlice) -> list[TensorSlice]:
    return list(weight.parts.values()) if isinstance(weight, QuantizedSlice) else [weight]


def flip(part: TensorSlice, at: int, bit: int) -> None:
    """Flip one bit in a tensor's file: bit `bit` of byte `at` of the tensor."""
    with Path(part.shard.place).open("r+b") as file:
        file.seek(part.offset + at)
        (byte,) = file.read(1)
        file.seek(part.offset + at)
        file.write(bytes([byte ^ (1 << bit)]))
