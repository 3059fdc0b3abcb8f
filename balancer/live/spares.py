"""Choose the spare replicas of a live cluster: one a server and layer, by the last steps' loads. No I/O.

The algorithm is `balancer.policies.spares`. A step of few tokens says little about the experts: steps are
joined until there are so many tokens per server that their noise is no more than a loaded replica must gain.

Shape suffixes: W steps, B scenarios, L layers, S servers, E logical experts.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import numpy.typing as npt

from balancer.planner.layout import Situation
from balancer.policies.spares import LEAST, SCENARIOS, choose_spares
from balancer.policies.sparse import Layout
from eaas.spares import SpareReplicas

__all__ = ["STEPS", "choose", "scenarios"]

STEPS = 8 * SCENARIOS
"""Number of last steps to look at, so that 8 may be joined for a scenario."""

# With this many tokens per server the noise, 1 / sqrt(tokens), is LEAST.
_LEAST_TOKENS = 1 / LEAST**2
_NONE = -1


def scenarios(tokens_WLE: npt.NDArray[np.int64], servers: int) -> npt.NDArray[np.float64]:
    """Join steps to loads that may come, float64 (B, L, E): the last ones, at most `SCENARIOS`.

    Each has at least 400 tokens a server and layer; the oldest steps, if too few for one more, are left out.
    None (B = 0) if all steps together have fewer.
    """
    least = _LEAST_TOKENS * servers * tokens_WLE.shape[1]
    found: list[npt.NDArray[np.float64]] = []
    joined_LE = np.zeros(tokens_WLE.shape[1:])
    for tokens_LE in tokens_WLE[::-1]:
        joined_LE += tokens_LE
        if joined_LE.sum() >= least:
            found.append(joined_LE)
            joined_LE = np.zeros_like(joined_LE)
        if len(found) == SCENARIOS:
            break
    return np.array(found[::-1]).reshape(-1, *tokens_WLE.shape[1:])


def choose(
    now: Situation,
    load_BLE: npt.NDArray[np.float64],
    spares: SpareReplicas,
    able: Container[str],
) -> SpareReplicas:
    """Choose the replicas of the spare slots, beside a placement.

    Args:
        now: The placement's live servers; each expert has a replica on one of them.
        load_BLE: The scenarios, at least one.
        spares: The replicas in the slots now.
        able: The servers that may hold spare replicas.

    Returns:
        At most one replica a server and layer. A server has spare slots if it is able, and its memory has
            room for one more expert of each layer.
    """
    layers, servers, _ = now.holds_LSE.shape
    has_slots_S = np.array([server in able for server in now.servers], np.bool_)
    if now.capacity_S is not None:
        has_slots_S &= now.holds_LSE.sum(axis=(0, 2)) + layers <= now.capacity_S
    held_LS = np.full((layers, servers), _NONE, np.int32)
    for s, server in enumerate(now.servers):
        if has_slots_S[s]:
            for layer, expert in spares.of(server):
                held_LS[layer, s] = expert
    layout = Layout.of(now.holds_LSE)
    found: dict[str, set[tuple[int, int]]] = {server: set() for server in now.servers}
    for number in range(layers):
        wanted_S = choose_spares(
            load_BLE[:, number],
            layout.part(number, number + 1),
            held_LS[number],
            open_S=has_slots_S,
            speeds_S=now.speeds_S,
        )
        for server, expert in zip(now.servers, wanted_S.tolist(), strict=True):
            if expert != _NONE:
                found[server].add((number, expert))
    return SpareReplicas(spares.epoch, {server: frozenset(p) for server, p in found.items()})
