from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Bool = npt.NDArray[np.bool_]
_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]

# Every function raises ValueError for an array of another item size or too short, and IndexError for
# an index that is out of range.

def group(
    ids: _Int64,
    wanted: _Bool | None,
    pairs: int,
    num_experts: int,
    chunk_pairs: int,
    chunk_of: _Int32,
    expert_of: _Int64,
    pairs_of: _Int64,
    /,
) -> int:
    """Fills the chunk of each pair (int32, -1 where not wanted) and the expert and number of pairs
    of each chunk (int64, room for `pairs` of them); returns how many chunks there are. `ids` is
    int64, `wanted` bool or None for all."""

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
    """Fills the server of each chunk (int64, -1 where no share of its expert is above 0): the first
    whose cumulative share of `shares` (float32, S x E) passes the chunk's draw in [0, 1), which is
    `draw` for the first chunk and `step` more, modulo 1, for each further one."""

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
    """Moves chunks (int64 servers) off the server that ends last, while that end gets earlier;
    returns the number of moves. `shares` is float32 (S, E), above 0 where a server may be asked;
    `work` (C), `rate` (S) and `ends` (S) are float64; `ends` holds the backlogs and becomes when
    each server ends."""

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
    """Fills the number of tokens of each server (int64, S), which they are (int64, one server's after
    another's) and their experts (int32, K each, -1 where it is another server's). There is to be room for
    T x min(S, K) rows."""

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
    """`group`, `by_share`, `level` (unless `rate` and `backlog` are None) and `split` in one; fills the last
    two as `split` does. Returns how many wanted pairs have no server, and of each server that has some its
    index, the number of its tokens and its work."""

def combine(
    out: _Float32,
    tokens: int,
    hidden: int,
    parts: Sequence[_Float32],
    rows: Sequence[_Int64],
    /,
) -> None:
    """Sums parts (float32, R x H) into the tokens that their rows (int64, R, ascending) name, in the order
    given; tokens in no part become 0."""
