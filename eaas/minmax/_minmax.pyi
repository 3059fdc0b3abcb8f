import numpy as np
import numpy.typing as npt

_Float64 = npt.NDArray[np.float64]

# Both raise ValueError for an array of another item size or too short, or a value out of range. A share
# above 0 is a replica. Experts without one are left out.

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
    """Fills the shares of `load` (E) of each replica (`shares` and `out`: S x E) that level the servers'
    load (with `backlog`, S) over `speeds` (S); returns that of the fullest. Experts without load keep
    their shares."""

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
    """Fills the load over speed (B) of the fullest server that the best split of each batch of `load`
    (B x E) leads to."""
