import numpy as np
import numpy.typing as npt

_Float64 = npt.NDArray[np.float64]

def levels(
    load: _Float64,
    batches: int,
    shares: _Float64,
    servers: int,
    experts: int,
    speeds: _Float64,
    backlog: _Float64 | None,
    levels: _Float64,
    out: _Float64 | None,
    /,
) -> None:
    """Split each batch of `load` (B x E) so that the largest load over speed of a server is minimal.

    `shares` (S x E) has the replicas: a share above 0 is one. `speeds` (S) and `backlog` (S) belong to the
    servers. Experts without replicas are ignored. Fills `levels` (B) with that largest load over speed, and
    `out` (S x E) with the shares for the last batch; experts without load keep theirs.

    Raises:
        ValueError: An array has the wrong item size or length, or a value is out of range.
    """
