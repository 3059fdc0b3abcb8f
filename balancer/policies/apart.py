"""The last pass behind every policy: replicas of an expert go to different nodes, and to different racks.

    alone   an expert with two or more replicas, all of them on one node

Step 1. Without a current layout, servers that are alike exchange all they hold. No load changes.
Step 2. Two servers exchange two experts. The pass takes the exchange that keeps the layer's peak load, then
        the one with the fewest loads of experts, then that of the most equal replicas.
Step 3. Servers pass experts around cycles (M. Klein 1967), until no layout with the same counts has fewer
        experts alone. Exchanges then lower the peak again as far as possible.

Every server keeps its number of replicas in each layer, and every expert its own: memory stays as it was. A
replica takes its share with it. Racks come second, after nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from eaas.nodes import rack_of

__all__ = ["ALL", "Nodes", "apart", "count_alone", "put_apart"]

_Bool = npt.NDArray[np.bool_]
_Float = npt.NDArray[np.float64]
_Int = npt.NDArray[np.int64]
ALL = 1 << 40
"""For `spread_over`: more replicas than an expert has."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes and racks of servers, numbered from 0 without gaps.

    Attributes:
        node_S: int32 (S): each server's node.
        rack_N: int32 (N): each node's rack; all 0 if racks are unknown or are the nodes.
    """

    node_S: npt.NDArray[np.int32]
    rack_N: npt.NDArray[np.int32]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Nodes:
        """Number the nodes of servers, given by name (`NODE` or `RACK/NODE`) or number."""
        numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
        racks = [rack_of(name) if isinstance(name, str) else name for name in numbers]
        rack_numbers = {rack: k for k, rack in enumerate(dict.fromkeys(racks))}
        if len(rack_numbers) == len(numbers):
            rack_numbers = dict.fromkeys(rack_numbers, 0)
        return cls(
            np.array([numbers[name] for name in names], np.int32),
            np.array([rack_numbers[rack] for rack in racks], np.int32),
        )

    @property
    def count(self) -> int:
        """Number of nodes (N)."""
        return len(self.rack_N)


def apart(
    holds_LSE: _Bool,
    shares_LSE: npt.NDArray[np.floating] | None,
    nodes: Nodes | None,
    *,
    load_LE: _Float | None = None,
    slots_LS: _Int | None = None,
    speeds_S: _Float | None = None,
    current_LSE: _Bool | None = None,
    fixed_LSE: _Bool | None = None,
    spread_over: int = ALL,
    rows: bool = False,
) -> tuple[_Bool, _Float]:
    """Return the layout that `put_apart` makes of a layout, which stays as it is; arguments: see there."""
    then_LSE = np.array(holds_LSE, np.bool_, order="C")
    then_shares: _Float | None = None
    if shares_LSE is not None:
        then_shares = np.array(shares_LSE, np.float64, order="C")
    put_apart(
        then_LSE,
        then_shares,
        nodes,
        load_LE=load_LE,
        slots_LS=slots_LS,
        speeds_S=speeds_S,
        current_LSE=current_LSE,
        fixed_LSE=fixed_LSE,
        spread_over=spread_over,
        rows=rows,
    )
    if then_shares is None:
        then_shares = then_LSE / np.maximum(then_LSE.sum(axis=1, keepdims=True), 1)
    return then_LSE, then_shares


def put_apart(
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
) -> _Int:
    """Put the replicas of each expert on different nodes, in place, as far as the counts allow.

    Args:
        holds_LSE: bool (L, S, E).
        shares_LSE: float64 (L, S, E); None: equal shares.
        nodes: The servers' nodes; None: unknown, so that nothing changes.
        load_LE: float64 (L, E); all equal by default.
        slots_LS: int64 (L, S); slots of the servers, for `rows`.
        speeds_S: float64 (S); all equal by default.
        current_LSE: What servers hold now, to prefer moves that load nothing. None: unknown.
        fixed_LSE: Replicas that stay. None: there are none.
        spread_over: Experts with up to so many replicas get a node for each; others at least two nodes.
        rows: Whether servers of a layer with equal slots, counts and speeds may exchange all they hold.

    Returns:
        int64 (L): layers of which the peak load has risen.
    """
    layers, servers, experts = holds_LSE.shape
    result_L = np.zeros(layers, np.int64)
    if nodes is not None and nodes.count > 1:
        compiled.apart(
            np.ones((layers, experts)) if load_LE is None else np.ascontiguousarray(load_LE),
            np.zeros((layers, servers), np.int64) if slots_LS is None else slots_LS,
            np.ones(servers) if speeds_S is None else speeds_S,
            *(nodes.node_S, nodes.rack_N, spread_over, rows),
            *(None if a is None else np.ascontiguousarray(a) for a in (current_LSE, fixed_LSE)),
            *(holds_LSE, shares_LSE, result_L),
        )
    return np.flatnonzero(result_L == 2)


def count_alone(holds_LSE: _Bool, nodes: Nodes, *, replicas: int = 1) -> int:
    """Count the experts, over all layers, that have all their replicas, at least so many, on one node."""
    on_LE = np.zeros(holds_LSE[:, 0].shape, np.int64)
    for node in range(nodes.count):
        on_LE += holds_LSE[:, nodes.node_S == node].any(axis=1)
    return int(((on_LE == 1) & (holds_LSE.sum(axis=1) >= replicas)).sum())
