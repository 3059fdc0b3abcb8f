from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Bool = npt.NDArray[np.bool_]
_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]

SIZE_CLASSES: int
"""Size classes of requests: the bit length of the number of tokens, below this."""

# Every function raises ValueError for an array of the wrong item size or length, and IndexError for an index
# out of range.

def plan(
    ids: _Int64,
    wanted: _Bool,
    tokens: int,
    top_k: int,
    firsts: _Int32,
    held_by: _Int32,
    shares: _Float32,
    servers: int,
    experts: int,
    load_pairs: float,
    call: int,
    layer: int,
    rate: _Float64 | None,
    backlog: _Float64 | None,
    rows_out: _Int64,
    ids_out: _Int32,
    /,
) -> tuple[int, list[tuple[int, int, float]]]:
    """The steps of `DispatchPolicy`; no levelling if `rate` and `backlog` are None.

    `firsts` (E + 1), `held_by` and `shares` are a layer's of `Replicas`. A chunk goes to the first
    server whose cumulative share passes the chunk's draw, which is evenly spread over the chunks, the
    calls of a layer and the layers. Fills the tokens server by server, and their experts (K each, -1
    for another server's): T x min(S, K) rows. Returns the number of wanted pairs without a server, and
    (server, tokens, work) for each server with tokens."""

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

def budget_s(usual_s: float, least_s: float, most_s: float, /) -> float:
    """Seconds until a request is given up, from its usual time; within the given bounds."""

def hedge_s(usual_s: float, tail: float, /) -> float:
    """Seconds until a request is hedged; `tail`: the multiple of its usual time that few exceed."""
