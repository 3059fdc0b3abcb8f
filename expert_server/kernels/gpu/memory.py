"""How much of a device's memory experts may take, beside the batches."""

from __future__ import annotations

from eaas.errors import ConfigError
from expert_server.kernels.gpu.packing import padded

__all__ = ["batch_bytes", "memory_limit", "taken"]

_MIB = 1 << 20
# Part of the memory that is left to the driver, to kernels' code and to fragmentation.
_SPARE = 1 / 16
_FLOAT32 = 4
# For each row: ids and order as int64, in four arrays that sorting needs at once.
_SORTING = 32


def batch_bytes(tokens: int, top_k: int, hidden: int, intermediate: int, element: int) -> int:
    """Return an upper bound for the device memory of a batch.

    Args:
        tokens: T.
        top_k: Experts of a token.
        hidden, intermediate: H, I.
        element: Bytes of a number that the products read.
    """
    rows = tokens * top_k
    # As they came and results; in the products' dtype and padded.
    for_tokens = padded(hidden) * 2 * (_FLOAT32 + element)
    for_rows = padded(intermediate) * element + hidden * _FLOAT32 + _SORTING
    return tokens * for_tokens + rows * for_rows


def taken(nbytes: int) -> int:
    """Return the bytes that torch's allocator takes from the device for a block, beside others of its size.

    Blocks of 1 to 10 MiB share segments of 20 MiB, and the rest of a segment is lost. Larger ones are rounded
    up to 2 MiB (torch, c10/cuda/CUDACachingAllocator.cpp).
    """
    if nbytes >= 10 * _MIB:
        return -(-nbytes // (2 * _MIB)) * 2 * _MIB
    if nbytes <= _MIB:
        return nbytes
    return 20 * _MIB // (20 * _MIB // nbytes)


def memory_limit(name: str, wanted: int, free: int, batch: int, replica: int) -> int:
    """Return the bytes that experts may take, without what torch's allocator adds to them.

    Args:
        name: The device, for the error.
        wanted: `expert_server.memory_bytes`; 0: all that is left.
        free: Free bytes.
        batch: Bytes of the largest batch.
        replica: Bytes of a replica.

    Raises:
        ConfigError: There is less.
    """
    left = int((free - batch) * (1 - _SPARE)) * replica // taken(replica)
    if left <= 0:
        raise ConfigError(
            f"{name} has {free / 1e9:.1f} GB free, and a batch may take {batch / 1e9:.1f} GB: set fewer "
            "expert_server.slots or slot_tokens, or free some"
        )
    if wanted > left:
        raise ConfigError(
            f"expert_server.memory_bytes {wanted}: {name} has {left} left for experts: give at most that"
        )
    return wanted or left
