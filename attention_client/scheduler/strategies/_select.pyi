import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float64 = npt.NDArray[np.float64]

# Every function raises ValueError for an array of another item size or too short, or a number out of range,
# and IndexError for an index that is out of range. Arrays are C-contiguous. `window` is (W, E), oldest
# request first. Choices fill `chosen` (int64): its first `have` indices are given, they add those up to
# `take`; of equally good requests the older one is taken. `start` (E) is a load that is there already, or
# None.

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
    """Adds the request v that has the least
    2 L.v + square |v|^2 - 2 level sum(v) - variance (2 sum(L) sum(v) + sum(v)^2) / E
    beside the load L so far. With `draws`, `sample` numbers in [0, 1) for each step, it looks only at so many
    requests, drawn by them without putting back. Returns the sum and the sum of squares of the load of all
    chosen.
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
    """Adds the request after which the hottest expert is least loaded; of equals the one with the
    higher peak."""

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
    """Adds the request with which the slowest server, and the mean of all, take the least time. `expert`
    and `share` (R) are the replicas', sorted by server; server s has those from first[s] to before first[s
    + 1], a layer's servers beside one another. Returns the `step_time` of all chosen."""

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
    """The sums of the `step_time` of all requests in batches of that size: by age, and with each batch chosen
    in turn, as by `for_servers`, beside the oldest request that is left."""

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
    """The largest, over servers, of max(load_s * experts with tokens, pair_s * pairs), for so many pairs of
    each expert; the sum of it over `layers`, each of servers / layers servers; the experts with tokens are
    the expected number (Poisson)."""

def difference(
    window: _Float64, requests: int, experts: int, groups: int, group_out: _Int64, /
) -> None:
    """Fills the group of each request (int64): groups of equal size that differ little, by the balanced
    largest differencing method. `requests` is a multiple of `groups`."""
