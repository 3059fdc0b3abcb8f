"""Issues a batch that is on the device: groups its rows by expert, then three launches.

Torch operators and launches alone, none of which waits for the device. Sizes of grids depend on shapes alone.

T tokens, K top-k, E experts of the table, M tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional
from triton.errors import TritonError

from expert_server.kernels.activation import Activation
from expert_server.kernels.gpu.batches import BatchMemory
from expert_server.kernels.gpu.packing import Layout, padded
from expert_server.kernels.gpu.products import combine, product
from expert_server.kernels.gpu.tiles import STEPS, SUM_COLUMNS, SUM_TOKENS, Coding, Tile

__all__ = ["Groups", "Program", "group_rows", "launch", "most_tiles"]


@dataclass(frozen=True)
class Program:
    """What device code is compiled for, beside the sizes of a batch."""

    layout: Layout
    activation: Activation
    tile: Tile


class Groups(NamedTuple):
    """Rows in the order of their experts, divided into tiles, all on the device.

    Attributes:
        expert_M: Expert of each tile.
        start_M, end_M: Rows of each tile; those behind the last tile are empty.
        order: (T * K) pair (token * K + k) of each row; pairs without an expert come first.
    """

    expert_M: torch.Tensor
    start_M: torch.Tensor
    end_M: torch.Tensor
    order: torch.Tensor


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
    expert_M = found_M.clamp(max=experts - 1)
    start_M = bounds[expert_M] + (tile_M - (ends_E - tiles_E)[expert_M]) * tile_rows
    end_M = bounds[expert_M + 1].where(found_M < experts, 0)
    return Groups(expert_M, start_M, end_M, order)


def launch(program: Program, memory: BatchMemory, addresses: torch.Tensor) -> None:
    """Issue a batch, in the current stream; writes `memory.out_TH`.

    Args:
        program: What to compute.
        memory: Of the batch; its ids are held.
        addresses: (E) addresses of the experts' blocks, on the device.

    Raises:
        RuntimeError: The device code cannot be compiled, or takes more than the device has.
    """
    layout, tile, x, ids_TK = program.layout, program.tile, memory.x_TH, memory.ids_TK
    (tokens, hidden), top_k = x.shape, ids_TK.shape[1]
    # So that the sum is exact: see `eaas.wire.slot`.
    y_dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    x = x.to(torch.float32 if layout.coding is Coding.FLOAT32 else torch.bfloat16)
    if hidden != padded(hidden):
        x = functional.pad(x, (0, padded(hidden) - hidden))
    h = x.new_empty(ids_TK.numel(), padded(layout.intermediate))
    y = x.new_empty(ids_TK.numel(), hidden, dtype=y_dtype)
    groups = group_rows(ids_TK, len(addresses), tile.rows)
    common = {
        "CODING": int(layout.coding),
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": STEPS[layout.coding],
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }
    activation = program.activation
    up, down = layout.up, layout.down
    tiles = len(groups.expert_M)
    try:
        product[tiles, -(-h.shape[1] // tile.columns)](
            x, h, addresses, *groups, memory.scores_TK,
            layout.intermediate, x.shape[1], h.shape[1], top_k, *up, layout.group or x.shape[1],
            IS_UP=True, HAS_BIAS=layout.has_bias[0], HAS_GATE=activation.has_gate,
            KIND=int(activation.kind), ALPHA=activation.alpha, LIMIT=activation.limit, **common,
        )  # fmt: skip
        product[tiles, -(-hidden // tile.columns)](
            h, y, addresses, *groups, memory.scores_TK,
            hidden, h.shape[1], hidden, top_k, *down, layout.group or h.shape[1],
            IS_UP=False, HAS_BIAS=layout.has_bias[1], HAS_GATE=False,
            KIND=0, ALPHA=0.0, LIMIT=0.0, **common,
        )  # fmt: skip
        combine[-(-tokens // SUM_TOKENS), -(-hidden // SUM_COLUMNS)](
            y, ids_TK, memory.out_TH, tokens, hidden, top_k,
            TOKENS=SUM_TOKENS, COLUMNS=SUM_COLUMNS, enable_fp_fusion=True,
        )  # fmt: skip
    except TritonError as error:
        # No RuntimeError by itself, so that the loop would not refuse the batch but end.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
