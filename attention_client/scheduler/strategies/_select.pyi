import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float64 = npt.NDArray[np.float64]

# Every function raises ValueError for an array of the wrong item size or length or a number out of range, and
# IndexError for an index out of range. Arrays are C-contiguous. `window` is (W, E), oldest request first.
# Choices fill `chosen` from index `have` up to `take`; the first `have` are given. Of equally good requests
# the older one wins. `start` (E) is the load that runs already, or None.

def greedy(
    window: _Float64,
    requests: int,
    experts: int,
    start: _Float64 | None,
    chosen: _Int64,
    have: int,
    take: int,
    square: float,
    level: float,
    variance: float,
    draws: _Float64 | None,
    sample: int,
    /,
) -> tuple[float, float]:
    """Add the request v with the least
    2 L.v + square |v|^2 - 2 level sum(v) - variance (2 sum(L) sum(v) + sum(v)^2) / E
    given the load L so far. With `draws` (`sample` numbers in [0, 1) per step), each step considers only
    `sample` requests, drawn without replacement. Returns the sum and the sum of squares of the total load.
    """

def least_peak(
    window: _Float64,
    requests: int,
    experts: int,
    start: _Float64 | None,
    chosen: _Int64,
    have: int,
    take: int,
    /,
) -> None:
    """Add the request that keeps the hottest expert's load least; of equals the one with the higher peak."""

def for_servers(
    window: _Float64,
    requests: int,
    experts: int,
    start: _Float64 | None,
    chosen: _Int64,
    have: int,
    take: int,
    expert: _Int32,
    share: _Float64,
    replicas: int,
    first: _Int64,
    servers: int,
    layers: int,
    load_s: float,
    pair_s: float,
    /,
) -> float:
    """Add the request with the least time of the slowest plus the mean server. `expert` and `share` (R)
    describe the replicas, sorted by server; server s holds first[s] to before first[s + 1], layer by layer.
    Returns the `step_time` of all chosen."""

def compare_orders(
    window: _Float64,
    requests: int,
    experts: int,
    batch: int,
    expert: _Int32,
    share: _Float64,
    replicas: int,
    first: _Int64,
    servers: int,
    layers: int,
    load_s: float,
    pair_s: float,
    /,
) -> tuple[float, float]:
    """Total `step_time` of all requests in batches of that size: by age, and with each batch chosen as by
    `for_servers` around the oldest remaining request."""

def step_time(
    load: _Float64,
    experts: int,
    expert: _Int32,
    share: _Float64,
    replicas: int,
    first: _Int64,
    servers: int,
    layers: int,
    load_s: float,
    pair_s: float,
    /,
) -> float:
    """Sum over the layers of the largest max(load_s * active experts, pair_s * pairs) of a server. The number
    of active experts is an expectation (Poisson)."""

def difference(
    window: _Float64, requests: int, experts: int, groups: int, group_out: _Int64, /
) -> None:
    """Fill the group of each request: similar groups of equal size, by the balanced largest differencing
    method. `requests` is a multiple of `groups`."""
