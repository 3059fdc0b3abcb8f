import numpy as np
import numpy.typing as npt

_Bool = npt.NDArray[np.bool_]
_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float64 = npt.NDArray[np.float64]

def plan(
    load: _Float64,
    scenarios: int,
    layers: int,
    servers: int,
    experts: int,
    slots: _Int64,
    speeds: _Float64,
    current: _Bool | None,
    nodes: _Int32 | None,
    most_abroad: int,
    price: float,
    holds: _Bool,
    shares: _Float64,
    /,
) -> None:
    """Plans every layer for `load` (B, L, E) and fills `holds` and `shares` (L, S, E, zeroed).

    Shapes: slots (L, S), speeds (S), current (L, S, E), nodes (S). A replica that is loaded must lower
    the mean PAR of the scenarios by `price`. Raises ValueError for an array of another size."""
