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
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.split import split
from eaas.nodes import rack_of

__all__ = ["ALL", "Nodes", "apart", "count_alone", "put_apart", "split_apart"]

_Bool = npt.NDArray[np.bool_]
_Float = npt.NDArray[np.float64]
_Int = npt.NDArray[np.int64]
ALL = 1 << 40
"""For `spread_over`: more replicas than an expert has."""

# Peaks this near are equal, and most splits that `split_apart` tries in a layer.
_NEAR = 1 + 1e-6
_TRIES = 512


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


class Limits(TypedDict, total=False):
    """What `put_apart` keeps and prefers; see its arguments."""

    load_LE: _Float | None
    slots_LS: _Int | None
    speeds_S: _Float | None
    current_LSE: _Bool | None
    fixed_LSE: _Bool | None
    spread_over: int
    rows: bool


def apart(
    holds_LSE: _Bool,
    shares_LSE: npt.NDArray[np.floating] | None,
    nodes: Nodes | None,
    **limits: Unpack[Limits],
) -> tuple[_Bool, _Float]:
    """Return the layout that `put_apart` makes of a layout, which stays as it is; arguments: see there."""
    then_LSE = np.array(holds_LSE, np.bool_, order="C")
    then_shares: _Float | None = None
    if shares_LSE is not None:
        then_shares = np.array(shares_LSE, np.float64, order="C")
    put_apart(then_LSE, then_shares, nodes, **limits)
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
) -> dict[int, float]:
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
        Layers of which the peak of the servers' loads over their speeds has risen, with the peak before.
    """
    layers, servers, experts = holds_LSE.shape
    result_L, peak_L = np.zeros(layers, np.int64), np.zeros(layers)
    if nodes is not None and nodes.count > 1:
        compiled.apart(
            np.ones((layers, experts)) if load_LE is None else np.ascontiguousarray(load_LE),
            np.zeros((layers, servers), np.int64) if slots_LS is None else slots_LS,
            np.ones(servers) if speeds_S is None else speeds_S,
            *(nodes.node_S, nodes.rack_N, spread_over, rows),
            *(None if a is None else np.ascontiguousarray(a) for a in (current_LSE, fixed_LSE)),
            *(holds_LSE, shares_LSE, result_L, peak_L),
        )
    return {layer: float(peak_L[layer]) for layer in np.flatnonzero(result_L == 2).tolist()}


def split_apart(
    load_E: _Float,
    holds_SE: _Bool,
    shares_SE: _Float,
    nodes: Nodes,
    speeds_S: _Float,
    peak: float,
    fixed_SE: _Bool | None = None,
) -> None:
    """Split a layer's load best, in place; exchange replicas while that lowers a peak above the one before.

    For layers in which `put_apart` raised the peak, which clients' best split only partly undoes. Exchanges
    leave no further expert alone. Time O(tries) splits.

    Args:
        load_E, holds_SE, shares_SE, nodes, speeds_S: The layer. Experts without load keep their shares.
        peak: The peak before; also the least to look for.
        fixed_SE: Replicas that stay. None: there are none.
    """
    if fixed_SE is None:
        fixed_SE = np.zeros_like(holds_SE)
    tries = _TRIES
    shares_SE[:] = split(load_E, shares_SE, speeds_S)
    level_S = (shares_SE * load_E).sum(axis=1) / speeds_S
    while level_S.max() > peak * _NEAR and tries > 0:
        best: tuple[float, _Float, _Bool] | None = None
        # Those with the most and the least load first.
        order = np.argsort(-np.abs(level_S[:, None] - level_S), axis=None, kind="stable")
        for s, t in zip(*np.unravel_index(order, (len(level_S),) * 2), strict=True):
            if s >= t or tries <= 0:
                continue
            here, there = (
                np.flatnonzero(holds_SE[i] & ~holds_SE[j] & ~fixed_SE[i])
                for i, j in ((s, t), (t, s))
            )
            for e, f in ((e, f) for e in here for f in there):
                pair = [e, f]
                before = _alone(holds_SE[:, pair], nodes)
                then_SE, then_shares = holds_SE.copy(), shares_SE.copy()
                then_SE[[s, t], e], then_SE[[s, t], f] = (False, True), (True, False)
                if (_alone(then_SE[:, pair], nodes) & ~before).any():
                    continue
                then_shares[[s, t], e] = 0.0, shares_SE[s, e]
                then_shares[[s, t], f] = shares_SE[t, f], 0.0
                then_shares = split(load_E, then_shares, speeds_S)
                level = float(((then_shares * load_E).sum(axis=1) / speeds_S).max())
                if level < (level_S.max() / _NEAR if best is None else best[0]):
                    best = level, then_shares, then_SE
                tries -= 1
                if tries <= 0 or level <= peak * _NEAR:
                    break
            if best is not None and best[0] <= peak * _NEAR:
                break
        if best is None:
            return
        shares_SE[:], holds_SE[:] = best[1:]
        level_S = (shares_SE * load_E).sum(axis=1) / speeds_S


def _alone(holds_SE: _Bool, nodes: Nodes) -> _Bool:
    """bool (E): whether an expert has several replicas, all on one node."""
    on_NE = np.zeros((nodes.count, holds_SE.shape[1]), np.int64)
    np.add.at(on_NE, nodes.node_S, holds_SE)
    return np.asarray((holds_SE.sum(axis=0) > 1) & ((on_NE > 0).sum(axis=0) == 1))


def count_alone(holds_LSE: _Bool, nodes: Nodes, *, replicas: int = 1) -> int:
    """Count the experts, over all layers, that have all their replicas, at least so many, on one node."""
    on_LE = np.zeros(holds_LSE[:, 0].shape, np.int64)
    for node in range(nodes.count):
        on_LE += holds_LSE[:, nodes.node_S == node].any(axis=1)
    return int(((on_LE == 1) & (holds_LSE.sum(axis=1) >= replicas)).sum())
