import numpy as np
import numpy.typing as npt

_Bool = npt.NDArray[np.bool_]
_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]

# Shapes: L layers, E experts, S servers, P replicas (room for them), N plans, B batches, K choices.
# A compact placement is `count` (L, E) and `server` (L, P): the servers of one expert's replicas after
# another's, -1 for a replica without a place. Outputs are filled in place; sizes come as numbers.
# Every function raises ValueError for an array of another size and IndexError for a wrong server.

def replicate(
    load: _Float64,
    extra: _Int64,
    layers: int,
    experts: int,
    cap: int,
    single: bool,
    count: _Int64,
    picks: _Int64,
    width: int,
    /,
) -> None:
    """One replica each, and `extra` (L) more where load per replica is highest; `cap` at most. `count`
    (L, E) and `picks` (L, width; none if width is 0): whose each further one is. `single`: divisions in
    float32."""

def pack(
    value: _Float64,
    layers: int,
    replicas: int,
    servers: int,
    server: _Int64,
    place: _Int64,
    /,
) -> None:
    """Each replica (value, L x P), heaviest first, to the server (L, P) that has the least and room, all
    P / S; `place` (L, P) counts those of a server. In float32."""

def separate(
    value: _Float64,
    expert: _Int64,
    layers: int,
    replicas: int,
    servers: int,
    experts: int,
    server: _Int64,
    place: _Int64,
    /,
) -> None:
    """Exchanges replicas of equal value where that parts two of one expert: their `server` and `place`."""

def place(
    load: _Float64,
    count: _Int64,
    slots: _Int64,
    speed: _Float64,
    plans: int,
    layers: int,
    experts: int,
    servers: int,
    replicas: int,
    server: _Int32,
    /,
) -> None:
    """Compact placements for counts (N, L, E) and slots (N, L, S), replicas of one expert apart."""

def refine(
    load: _Float64,
    count: _Int64,
    speed: _Float64,
    layers: int,
    experts: int,
    servers: int,
    replicas: int,
    budget: int,
    server: _Int32,
    /,
) -> None:
    """Changes `server` (L, P) by `budget` exchanges per layer at most, each with the peak's server."""

def scatter(
    count: _Int64,
    server: _Int32,
    layers: int,
    experts: int,
    servers: int,
    replicas: int,
    holds: _Bool,
    shares: _Float64 | None,
    /,
) -> None:
    """A compact placement into zeroed (L, S, E) arrays, an expert's replicas with equal shares; without
    shares, holds alone."""

def scatter_replicas(
    count: _Int64,
    expert: _Int64,
    server: _Int64,
    layers: int,
    experts: int,
    servers: int,
    replicas: int,
    holds: _Bool,
    shares: _Float64,
    /,
) -> None:
    """The same of replicas in any order, their experts and servers (L, P); two of one expert on a server
    have the sum of their shares."""

def count_new(holds: _Bool, current: _Bool, size: int, /) -> int:
    """Replicas that are held and were not."""

def server_load(
    load: _Float64,
    holds: _Bool,
    shares: _Float64,
    layers: int,
    servers: int,
    experts: int,
    out: _Float64,
    /,
) -> None:
    """Fills `out` (L, S)."""

def spread(
    count: _Int64,
    slots: _Int64,
    layers: int,
    servers: int,
    experts: int,
    holds: _Bool,
    shares: _Float64,
    /,
) -> None:
    """Sets `holds` and `shares` (L, S, E, zeroed): counts (L, E) dealt to servers with those slots (L, S)."""

def swap_hottest(
    load: _Float64,
    speed: _Float64,
    layers: int,
    servers: int,
    experts: int,
    budget: int,
    holds: _Bool,
    swaps: _Int64,
    /,
) -> None:
    """Changes `holds` (L, S, E) by `budget` swaps per layer at most; `swaps` (L) says how many."""

def held_load(
    load: _Float64,
    holds: _Bool,
    slots: _Int64,
    layers: int,
    servers: int,
    experts: int,
    out: _Float64,
    fits: _Bool,
    /,
) -> None:
    """Fills `out` (L, S) with the loads of servers, each expert's in equal parts, and `fits` (L): each
    expert is held, and no server holds more than its slots (L, S)."""

def equal_shares(
    holds: _Bool, layers: int, servers: int, experts: int, shares: _Float64, /
) -> None:
    """Equal shares of each expert into zeroed `shares` (L, S, E)."""

def compact_load(
    load: _Float64,
    count: _Int64,
    server: _Int32,
    layers: int,
    servers: int,
    experts: int,
    replicas: int,
    out: _Float64,
    /,
) -> None:
    """Fills `out` (L, S) with the loads of servers under a compact placement."""

def match(
    count: _Int64,
    server: _Int32,
    current: _Bool,
    kind: _Int64,
    layers: int,
    servers: int,
    experts: int,
    replicas: int,
    optimal: bool,
    server_of: _Int64,
    /,
) -> None:
    """Which server (L, S) gets the experts that a compact placement has on its server s; only servers of
    one kind (L, S) change places."""

def replay(
    load: _Float32,
    count: _Int64,
    server: _Int32,
    plans: int,
    batches: int,
    layers: int,
    experts: int,
    servers: int,
    replicas: int,
    out: _Float64,
    /,
) -> None:
    """Adds to `out` (N, L) the balancedness of each batch (B, L, E) under compact placements (N, ...)."""

def allocate(
    gain: _Float64,
    replicas: _Int64,
    limit: _Int64,
    layers: int,
    choices: int,
    budget: int,
    chosen: _Int64,
    /,
) -> None:
    """`chosen` (L): the replicas (K) of each layer with the greatest sum of gains (L, K)."""

def interleave(
    total: _Int64, slots: _Int64, layers: int, servers: int, assigned: _Int64, /
) -> None:
    """`assigned` (L, S): how many of a layer's experts (total, L) each server is to hold."""
