import numpy as np
import numpy.typing as npt

_Float64 = npt.NDArray[np.float64]

# Both raise ValueError for arrays of wrong item size or length, and for values out of range. A share above 0
# is a replica. Experts without replicas are ignored.

def split(
    load: _Float64,
    shares: _Float64,
    servers: int,
    experts: int,
    speeds: _Float64,
    backlog: _Float64 | None,
    out: _Float64,
    /,
) -> float:
    """Fill `out` (S x E) with the shares of `load` (E) that minimise the largest load over speed of a server.

    `shares` (S x E) has the replicas, `speeds` (S) and `backlog` (S) belong to the servers. Returns that
    largest load over speed. Experts without load keep their shares.
    """

def levels(
    load: _Float64,
    batches: int,
    shares: _Float64,
    servers: int,
    experts: int,
    speeds: _Float64,
    out: _Float64,
    /,
) -> None:
    """Fill `out` (B) with the largest load over speed under the best split of each batch of `load`."""
