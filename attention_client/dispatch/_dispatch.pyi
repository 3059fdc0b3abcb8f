from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Bool = npt.NDArray[np.bool_]
_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]

# Every function raises ValueError for an array of the wrong item size or length, and IndexError for an index
# out of range.

def group(
    ids: _Int64,
    wanted: _Bool,
    pairs: int,
    num_experts: int,
    chunk_pairs: int,
    chunk_of: _Int32,
    expert_of: _Int64,
    pairs_of: _Int64,
    /,
) -> int:
    """Fill the chunk of each pair (-1 if not wanted), and the expert and number of pairs of each chunk
    (arrays as long as `pairs`). Returns the number of chunks."""

def by_share(
    expert_of: _Int64,
    chunks: int,
    shares: _Float32,
    servers: int,
    experts: int,
    draw: float,
    step: float,
    server_out: _Int64,
    /,
) -> None:
    """Fill the server of each chunk (-1 if no share of its expert is above 0): the first server whose
    cumulative share (S x E) passes the chunk's draw, which is `draw` for the first chunk and `step` more,
    modulo 1, for each next one."""

def level(
    server_of: _Int64,
    expert_of: _Int64,
    work: _Float64,
    chunks: int,
    shares: _Float32,
    servers: int,
    experts: int,
    rate: _Float64,
    ends: _Float64,
    /,
) -> int:
    """Move chunks off the server that finishes last, while that makes the call finish earlier. Returns the
    number of moves. `shares` (S, E) is above 0 if a server may be asked; `ends` (S) holds the backlogs and
    becomes the finish times; `work` is (C), `rate` (S)."""

def split(
    ids: _Int64,
    chunk_of: _Int32,
    tokens: int,
    top_k: int,
    server_of: _Int64,
    chunks: int,
    count_out: _Int64,
    rows_out: _Int64,
    ids_out: _Int32,
    servers: int,
    /,
) -> None:
    """Fill the number of tokens of each server (S), the tokens server by server, and their experts (K each,
    -1 for another server's). The outputs hold T x min(S, K) rows."""

def plan(
    ids: _Int64,
    wanted: _Bool,
    tokens: int,
    top_k: int,
    shares: _Float32,
    servers: int,
    experts: int,
    chunk_pairs: int,
    draw: float,
    step: float,
    rate: _Float64 | None,
    backlog: _Float64 | None,
    rows_out: _Int64,
    ids_out: _Int32,
    /,
) -> tuple[int, list[tuple[int, int, float]]]:
    """`group`, `by_share`, `level` (unless `rate` and `backlog` are None) and `split` in one call; fills the
    last two arguments. Returns the number of wanted pairs without a server, and (server, tokens, work) for
    each server with tokens."""

def combine(
    out: _Float32,
    tokens: int,
    hidden: int,
    parts: Sequence[_Float32],
    rows: Sequence[_Int64],
    /,
) -> None:
    """Sum parts (R x H) into the tokens of their rows (R, ascending), in the given order. Tokens without a
    part become 0."""
