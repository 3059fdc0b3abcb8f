"""Anti-affinity, the last pass behind every policy: replicas of an expert go to different nodes and racks.

Step 1. Without a current layout, servers that are alike exchange all they hold. No load changes.
Step 2. Two servers exchange two experts. The pass takes the exchange that keeps the layer's peak load, then
        the one with the fewest loads of experts, then that of the most equal replicas.
Step 3. Servers pass experts around cycles (M. Klein 1967), until no layout with the same counts has fewer
        experts on one node. Exchanges then lower the peak again as far as possible.

Every server keeps its number of replicas in each layer, and every expert its own: memory stays as it was. A
replica takes its share with it. Racks come second, after nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from eaas.minmax import split
from eaas.nodes import rack_of

__all__ = ["ALL", "Nodes", "apply_anti_affinity", "count_on_one_node", "split_again"]

_Bool = npt.NDArray[np.bool_]
_Float = npt.NDArray[np.float64]
_Int = npt.NDArray[np.int64]
ALL = 1 << 40
"""For `spread_over`: more replicas than an expert has."""

# Peaks this near are equal, and most splits that `split_again` tries in a layer.
_NEAR = 1 + 1e-6
_TRIES = 256


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes and racks of servers, numbered from 0 without gaps.

    Attributes:
        node_S: int32 (S): each server's node.
        rack_S: int32 (S): each server's rack; all 0 if racks are unknown or are the nodes.
    """

    node_S: npt.NDArray[np.int32]
    rack_S: npt.NDArray[np.int32]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Nodes:
        """Number the nodes of servers, given by name (`NODE` or `RACK/NODE`) or number."""
        numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
        rack = {name: rack_of(name) if isinstance(name, str) else name for name in numbers}
        rack_numbers = {rack: k for k, rack in enumerate(dict.fromkeys(rack.values()))}
        if len(rack_numbers) == len(numbers):
            rack_numbers = dict.fromkeys(rack_numbers, 0)
        return cls(
            np.array([numbers[name] for name in names], np.int32),
            np.array([rack_numbers[rack[name]] for name in names], np.int32),
        )

    @property
    def count(self) -> int:
        """Number of nodes (N)."""
        return int(self.node_S.max(initial=-1)) + 1


def apply_anti_affinity(
    holds_LSE: _Bool,
    shares_LSE: _Float | None,
    nodes: Nodes | None,
    *,
    load_LE: _Float | None = None,
    slots_LS: _Int | None = None,
    speeds_S: _Float | None = None,
    current_LSE: _Bool | None = None,
    fixed_LSE: _Bool | None = None,
    spread_over: int = ALL,
    rows: bool = False,
    save: bool = False,
) -> list[int]:
    """Put the replicas of each expert on different nodes, in place, as far as the counts allow.

    Args:
        holds_LSE: bool (L, S, E).
        shares_LSE: float64 (L, S, E); None: equal shares.
        nodes: The servers' nodes; None: unknown.
        load_LE: float64 (L, E); all equal by default.
        slots_LS: int64 (L, S); slots of the servers, for `rows`.
        speeds_S: float64 (S); all equal by default.
        current_LSE: What servers hold now, to prefer moves that load nothing. None: unknown.
        fixed_LSE: Replicas that stay. None: there are none.
        spread_over: Experts with up to so many replicas get a node for each; others at least two nodes.
        rows: Whether servers of a layer with equal slots, counts and speeds may exchange all they hold.
        save: Whether replicas also move so that no layout with these counts and nodes takes fewer loads.

    Returns:
        Layers of which the peak of the servers' loads over their speeds has risen.
    """
    layers, servers, experts = holds_LSE.shape
    risen_L = np.zeros(layers, np.bool_)
    if save or (nodes is not None and nodes.count > 1):
        group_GS = np.zeros((2, servers), np.int32)
        if nodes is not None:
            group_GS[:] = nodes.node_S, nodes.rack_S
        compiled.anti_affinity(
            np.ones((layers, experts)) if load_LE is None else np.ascontiguousarray(load_LE),
            np.zeros((layers, servers), np.int64) if slots_LS is None else slots_LS,
            np.ones(servers) if speeds_S is None else speeds_S,
            *(group_GS, spread_over, save, rows),
            *(None if a is None else np.ascontiguousarray(a) for a in (current_LSE, fixed_LSE)),
            *(holds_LSE, shares_LSE, risen_L),
        )
    return np.flatnonzero(risen_L).tolist()


def split_again(
    load_E: _Float,
    holds_SE: _Bool,
    shares_SE: _Float,
    nodes: Nodes,
    speeds_S: _Float,
    peak: float,
) -> None:
    """Split a layer's load best, in place; exchange replicas while that lowers a peak above the one before.

    For layers in which `apply_anti_affinity` raised the peak, which the best split only partly undoes.
    Exchanges leave no further expert on one node. Time O(_TRIES) splits.
    """
    shares_SE[:] = split(load_E, holds_SE, speeds_S)
    level_S = shares_SE @ load_E / speeds_S
    tries = 0
    while tries < _TRIES and level_S.max() > peak * _NEAR:
        for s, t, e, f in _exchanges(holds_SE, level_S, nodes):
            then_SE = holds_SE.copy()
            then_SE[[s, t], e], then_SE[[s, t], f] = (False, True), (True, False)
            then_shares = split(load_E, then_SE, speeds_S)
            tries += 1
            if (then_shares @ load_E / speeds_S).max() < level_S.max() / _NEAR:
                holds_SE[:], shares_SE[:] = then_SE, then_shares
                level_S = shares_SE @ load_E / speeds_S
                break
            if tries == _TRIES:
                return
        else:
            return


def _exchanges(
    holds_SE: _Bool, level_S: _Float, nodes: Nodes
) -> Iterator[tuple[int, int, int, int]]:
    """Exchanges that leave no further expert on one node: of s, t, e, f. The fullest and emptiest first."""
    order_S = np.argsort(-level_S, kind="stable").tolist()
    for s, t in itertools.product(order_S, order_S[::-1]):
        one, other = (np.flatnonzero(holds_SE[i] & ~holds_SE[j]) for i, j in ((s, t), (t, s)))
        for e, f in itertools.product(one.tolist(), other.tolist()):
            then_SK = holds_SE[:, [e, f]]
            before_K = [np.ptp(nodes.node_S[then_S]) > 0 for then_S in then_SK.T]
            then_SK[[s, t]] = then_SK[[t, s]]
            after_K = [np.ptp(nodes.node_S[then_S]) > 0 for then_S in then_SK.T]
            if all(now or not was for was, now in zip(before_K, after_K, strict=True)):
                yield s, t, e, f


def count_on_one_node(holds_LSE: _Bool, nodes: Nodes, *, replicas: int = 1) -> int:
    """Count the experts, over all layers, that have all their replicas, at least so many, on one node."""
    on_LE = np.zeros(holds_LSE[:, 0].shape, np.int64)
    for node in range(nodes.count):
        on_LE += holds_LSE[:, nodes.node_S == node].any(axis=1)
    return int(((on_LE == 1) & (holds_LSE.sum(axis=1) >= replicas)).sum())
