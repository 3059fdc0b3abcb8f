import torch

multiplies: int
"""Whether `multiply` works: on this processor, and with this torch (2.10 or newer)."""
has_tiles: int
"""Whether it computes in tiles of Intel AMX."""

def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    pool: object,
    /,
) -> bool:
    """Compute torch.nn.functional.linear in bfloat16: (.., I), (O, I), (O) -> (.., O).

    Sums are float32, and are rounded once. A row's result does not depend on the rows beside it.

    Args:
        x: Contiguous, at most 4 dimensions.
        weight: Its rows are contiguous.
        bias: Contiguous, or None.
        out: Contiguous; gets the result.
        pool: From `_paged.pool`.

    Returns:
        False if the arguments are others, and nothing was computed.

    Raises:
        MemoryError: There is no memory for a copy of the rows.
    """
