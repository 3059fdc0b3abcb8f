"""Groups a batch's rows by expert on the device: torch operators alone, none of which waits for the device.

T tokens, K top-k, E experts of the table, M tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Groups", "group_rows", "most_tiles"]


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows in the order of their experts, divided into tiles, all on the device.

    Attributes:
        order: (T * K) pair (token * K + k) of each row; pairs without an expert come first.
        expert_M: Expert of each tile.
        start_M, end_M: Rows of each tile; those behind the last tile are empty.
    """

    order: torch.Tensor
    expert_M: torch.Tensor
    start_M: torch.Tensor
    end_M: torch.Tensor


def most_tiles(rows: int, experts: int, tile_rows: int) -> int:
    """Largest number of tiles that so many rows can need: the grid's size, known without the device."""
    return (rows + min(rows, experts) * (tile_rows - 1)) // tile_rows


def group_rows(ids_TK: torch.Tensor, experts: int, tile_rows: int) -> Groups:
    """Sort the pairs by expert and divide each expert's rows into tiles; an expert without rows has none.

    Args:
        ids_TK: Experts, int32 or int64; -1 means "none here".
        experts: E; all ids are below.
        tile_rows: Rows of a tile.
    """
    device = ids_TK.device
    ids, order = ids_TK.flatten().sort(stable=True)
    # Rows of expert e: bounds[e] to bounds[e + 1].
    bounds = torch.searchsorted(ids, torch.arange(experts + 1, dtype=ids.dtype, device=device))
    tiles_E = (bounds[1:] - bounds[:-1] + (tile_rows - 1)) // tile_rows
    ends_E = tiles_E.cumsum(0)
    tile_M = torch.arange(most_tiles(len(ids), experts, tile_rows), device=device)
    found_M = torch.searchsorted(ends_E, tile_M, right=True)
    is_tile_M = found_M < experts
    expert_M = found_M.clamp(max=experts - 1)
    start_M = bounds[expert_M] + (tile_M - (ends_E - tiles_E)[expert_M]) * tile_rows
    return Groups(order, expert_M, start_M, bounds[expert_M + 1].where(is_tile_M, 0))
