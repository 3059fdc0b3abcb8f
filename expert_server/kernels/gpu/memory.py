"""How much of a device's memory experts may take, beside the batches."""

from __future__ import annotations

from eaas.errors import ConfigError
from expert_server.kernels.gpu.packing import padded

__all__ = ["batch_bytes", "memory_limit"]

# Part of the memory that is left to the driver, to kernels' code and to holes between blocks.
_SPARE = 1 / 16
_FLOAT32 = 4
# For each row: ids and order as int64, in four arrays that sorting needs at once.
_SORTING = 32


def batch_bytes(tokens: int, top_k: int, hidden: int, intermediate: int, element: int) -> int:
    """Estimate the device memory of a batch, from above.

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


def memory_limit(name: str, wanted: int, free: int, batch: int) -> int:
    """Return the bytes that experts may take.

    Args:
        name: The device, for the error.
        wanted: `expert_server.memory_bytes`; 0: all that is left.
        free: Free bytes.
        batch: Bytes of the largest batch.

    Raises:
        ConfigError: There is less.
    """
    left = int((free - batch) * (1 - _SPARE))
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
