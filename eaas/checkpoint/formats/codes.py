"""Steps that several formats share: fields of a section, groups of inputs, packed codes, blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.stored import Unreadable

if TYPE_CHECKING:
    import torch

__all__ = [
    "block_of",
    "by_channel",
    "group_of",
    "input_order",
    "join_halves",
    "matches",
    "number",
    "one_of",
    "unpack_words",
]

_BEYOND = 2**31


def number(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is there; None: none is.

    Raises:
        Unreadable: It is no integer, or beyond 32 bits.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        try:
            found = int(value)
        except (TypeError, ValueError, OverflowError):
            found = _BEYOND
        if not -_BEYOND < found < _BEYOND or (isinstance(value, float) and found != value):
            raise Unreadable(f"{name} is {value!r:.40}, not an integer")
        return found
    return None


def block_of(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return the rows and inputs of a block: [128, 128], or "128x128" as early releases write it.

    Raises:
        Unreadable: The field does not name two sizes above 0.
    """
    value = config[name]
    sizes = value.lower().split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2:
        rows, inputs = (number({name: size}, name) or 0 for size in sizes)
        if rows > 0 and inputs > 0:
            return rows, inputs
    raise Unreadable(f"{name} is {value!r:.40}, not two sizes above 0")


def one_of(config: Mapping[str, Any], names: tuple[str, ...], default: str) -> str:
    """Return what these fields say, which are one setting in several releases, in lower case.

    Raises:
        Unreadable: They contradict one another.
    """
    found = {name: str(config[name]).lower() for name in names if config.get(name) is not None}
    if len(set(found.values())) > 1:
        raise Unreadable("contradictory " + ", ".join(f"{k} {v!r}" for k, v in found.items()))
    return next(iter(found.values()), default)


def matches(field: str, pattern: str, module: str) -> bool:
    """Whether a regular expression of a field fits the beginning of a module's name.

    Raises:
        Unreadable: It is none.
    """
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise Unreadable(
            f"{field} has an invalid regular expression, {pattern!r}: {error}"
        ) from error


def group_of(weight: str, inputs: int, groups: int, stated: int | None) -> int:
    """Return the inputs per scale, which may be more than there are; 0: one scale per channel.

    The tensors decide: published sections may state another size. The stated one tells of a short last group.

    Args:
        weight: Names the weight in messages.
        inputs: K.
        groups: Scales of a channel.
        stated: The section's size; None or not positive: none.

    Raises:
        Unreadable: No size gives so many groups.
    """
    if stated is not None and stated > 0 and -(-inputs // stated) == groups:
        return stated
    if groups == 1:
        return 0
    if groups > 0 and inputs % groups == 0:
        return inputs // groups
    raise Unreadable(
        f"{weight} has scales for {groups} groups of its {inputs} inputs, which group_size {stated} does not "
        "give"
    )


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack int32 words along the last dimension, the lowest bits first: (..., W) -> uint8 (..., count)."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :count]


def join_halves(codes_NK: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes, uint8 (N, K), as `QuantizedMatrix` has them: (N, ceil(K / 2)), the even ones low."""
    from torch.nn import functional

    codes_NK = functional.pad(codes_NK, (0, codes_NK.shape[1] % 2))
    return codes_NK[:, ::2] | codes_NK[:, 1::2] << 4


def by_channel(
    scales: torch.Tensor, rows: int, inputs: int, block: tuple[int, int]
) -> torch.Tensor:
    """Expand scales of blocks, channels or the whole matrix to one row per channel: (N, G), float32.

    Args:
        scales: (), (1), (N), (N, G) with one row per channel, or (ceil(N / block rows), G).
        rows: N.
        inputs: K.
        block: Rows and inputs of a block; (1, group) if every channel has scales of its own.

    Raises:
        Unreadable: The number of scales is another.
    """
    import torch

    found = scales.to(torch.float32)
    if found.numel() == 1:
        return found.reshape(1, 1).expand(rows, 1)
    if found.dim() == 1:
        found = found.unsqueeze(1)
    if found.shape == (rows, 1):
        return found
    height, group = block
    wanted = (-(-rows // height), -(-inputs // group))
    if found.shape != wanted:
        raise Unreadable(f"scales of shape {tuple(scales.shape)} instead of {wanted}")
    return found.repeat_interleave(height, dim=0)[:rows]


def input_order(group_of_K: torch.Tensor, group: int) -> torch.Tensor | None:
    """Turn the group of each input into the order of the inputs by group, (K); None: they lie in order.

    Raises:
        Unreadable: The groups are not all of one size, but for the last one.
    """
    import torch

    in_order = torch.arange(len(group_of_K), dtype=torch.int64) // group
    group_of_K = group_of_K.to(torch.int64)
    if torch.equal(group_of_K, in_order):
        return None
    order = torch.argsort(group_of_K, stable=True)
    if not torch.equal(group_of_K[order], in_order):
        raise Unreadable(f"g_idx does not make groups of {group} inputs")
    return order
