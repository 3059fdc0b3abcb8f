"""Checks that weights fit the model, and experts one another, as the format of a checkpoint reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from eaas.checkpoint.formats import StoredFormat, StoredMatrix
from eaas.checkpoint.header import TensorEntry
from eaas.checkpoint.source import CONFIG
from eaas.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TORCH_DTYPES", "common_format", "refuse_misfits"]

TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Floating-point numbers of safetensors that a model computes with -> torch's names."""


def refuse_misfits(
    place: Callable[[str], str],
    skeleton: nn.Module,
    targets: Mapping[str, tuple[str, str | None]],
    tensors: Mapping[str, TensorEntry],
    matrices: Mapping[str, StoredMatrix],
) -> None:
    """Check the dtype and the sizes of each weight against the model.

    Args:
        place: Names a file of the checkpoint in messages.
        skeleton: The model on the meta device.
        targets: Weight -> its parameter or buffer of the model, and transformers' rule that converts it.
        tensors: Tensor name -> header entry.
        matrices: Name of a quantised weight -> how it is stored.

    Raises:
        UnsupportedModelError: A weight has integers where the model has floats, or other sizes.
    """
    places = skeleton.state_dict()
    turned = {
        name for name, module in skeleton.named_modules() if getattr(module, "is_transposed", False)
    }
    for key, (target, pattern) in targets.items():
        wanted, matrix = places[target], matrices.get(key)
        if matrix is None:
            entry = tensors[key]
            if wanted.is_floating_point() and entry.dtype not in TORCH_DTYPES:
                raise UnsupportedModelError(
                    f"{place(entry.shard)}: tensor {key} is {entry.dtype} where the model has floating-point "
                    "numbers, and config.json tells no format of it: use another version of the model"
                )
            if pattern is None and entry.shape != wanted.shape:
                raise UnsupportedModelError(
                    f"{place(CONFIG)}: {key} is {entry.shape} in {entry.shard}, where the model has "
                    f"{tuple(wanted.shape)}: use files and config.json of one version"
                )
            continue
        shape = tuple(wanted.shape)
        if target.rpartition(".")[0] in turned:
            # Formats have the inputs last.
            shape = (*shape[:-2], shape[-1], shape[-2])
        # transformers' rules put experts, and their gate and up, one below the other.
        if matrix.shape != shape if pattern is None else matrix.shape[-1] != shape[-1]:
            raise UnsupportedModelError(
                f"{place(CONFIG)}: {key} is {matrix.shape} as {matrix.stored}, where the model has {shape}: "
                "correct the bits of the quantisation, or the sizes of the model"
            )


def common_format(
    source: object, experts: Iterable[tuple[str, StoredFormat | None]]
) -> StoredFormat | None:
    """Return the format of all routed experts; None: they are not quantised.

    Args:
        source: Names the checkpoint in messages.
        experts: Name and format of each matrix.

    Raises:
        UnsupportedModelError: Two differ, because kernels compute experts of one format; names both.
    """
    found: tuple[str, StoredFormat | None] | None = None
    for name, stored in experts:
        if found is not None and not _are_alike(stored, found[1]):
            raise UnsupportedModelError(
                f"{source}: routed experts have several number formats: {found[0]} is "
                f"{found[1] or 'not quantised'}, {name} is {stored or 'not quantised'}: quantise all of "
                "them alike"
            )
        if found is None or (stored is not None and stored.group):
            found = name, stored
    return None if found is None else found[1]


def _are_alike(first: StoredFormat | None, second: StoredFormat | None) -> bool:
    """Whether a kernel computes both: one scale per channel is one group."""
    if first is None or second is None:
        return first is second
    groups = {first.group, second.group} - {0}
    return len(groups) < 2 and replace(first, group=0) == replace(second, group=0)
