"""Cost of uneven load over servers: the busiest server determines the time of a layer."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

__all__ = [
    "allocate_replicas",
    "balancedness",
    "pack_longest_first",
    "redundancy_bytes",
    "replica_loads",
    "straggler_time",
]

Float = npt.NDArray[np.float64]


def balancedness(load_S: npt.ArrayLike) -> float:
    """Compute mean over maximum of the servers' loads: 1.0 is perfect, also returned without load.

    vLLM logs it as `balancedness`; its inverse is the PAR (peak-to-average ratio).
    """
    load = np.asarray(load_S, np.float64)
    peak = float(load.max())
    return 1.0 if peak == 0 else float(load.mean()) / peak


def straggler_time(load_S: npt.ArrayLike, speeds_S: npt.ArrayLike = 1.0) -> float:
    """Compute the time at which the last server is done: the highest load over speed.

    It is at least total load over total speed, and at least the time of an unsplittable load on the fastest
    server.
    """
    return float((np.asarray(load_S, np.float64) / np.asarray(speeds_S, np.float64)).max())


def allocate_replicas(load_E: npt.ArrayLike, slots: int) -> npt.NDArray[np.int64]:
    """Choose replica counts: one per expert, then repeatedly one more for the highest load per replica.

    This is the counting half of DeepSeek's EPLB (`replicate_experts`). More replicas do not always help,
    because the result depends on how they pack (`pack_longest_first`).

    Args:
        load_E: (E), at least 0.
        slots: Total number of replicas.

    Returns:
        int64 (E), which sums to slots; of equal loads the lower id comes first.

    Raises:
        ValueError: slots is below E.

    Time O(E + (slots - E) log E).
    """
    load = np.asarray(load_E, np.float64).tolist()
    if slots < len(load):
        raise ValueError(f"slots: {slots} cannot hold {len(load)} experts")
    replicas = [1] * len(load)
    heap = [(-value, expert) for expert, value in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(slots - len(load)):
        expert = heap[0][1]
        replicas[expert] += 1
        heapq.heapreplace(heap, (-load[expert] / replicas[expert], expert))
    return np.array(replicas, np.int64)


def replica_loads(load_E: npt.ArrayLike, replicas_E: npt.ArrayLike) -> Float:
    """float64 (sum of replicas): each expert's load, split evenly over its replicas.

    Raises ValueError: an expert has no replica.
    """
    replicas = np.asarray(replicas_E, np.int64)
    if replicas.min(initial=1) < 1:
        raise ValueError(f"replicas_E: expert {int(replicas.argmin())} has none")
    return np.asarray(np.repeat(np.asarray(load_E, np.float64) / replicas, replicas))


def pack_longest_first(load_R: npt.ArrayLike, servers: int) -> Float:
    """Compute server loads when each replica, heaviest first, goes to the least loaded server.

    By Graham's LPT rule the maximum is at most 4/3 of the best possible one.

    Args:
        load_R: (R): loads of replicas.
        servers: S; their slots are not limited.

    Returns:
        float64 (S).
    """
    load_S = np.zeros(servers, np.float64)
    for load in sorted(np.asarray(load_R, np.float64).tolist(), reverse=True):
        load_S[load_S.argmin()] += load
    return load_S


def redundancy_bytes(layers: int, expert_bytes: int, replicas_per_server: int) -> int:
    """Compute a server's memory for redundant experts, `replicas_per_server` in each MoE layer, in bytes.

    In DeepSeek-V3 (58 layers; an expert is 3 x 7168 x 2048 bytes in FP8), one per layer costs 2.4 GiB.
    """
    return layers * expert_bytes * replicas_per_server
