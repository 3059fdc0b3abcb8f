"""The policy EPLB: redundant replicas for hot experts, packed heaviest first (DeepSeek-AI, EPLB, 2025).

    logical expert   one of a layer's E experts
    physical expert  a replica: physical ids 0 to P-1 count servers' slots, server after server
    redundant        a replica beyond an expert's first
    group            experts that the router chooses together; whole groups go to a node

Two policies: the global one replicates and packs over all servers; the hierarchical one packs groups to nodes
first, then does the same within each node. For every input that DeepSeek's program takes, both give its
replica counts and server loads, computed in float32 like there. They also take any number of slots and
servers of different sizes and speeds, and keep replicas of one expert on different servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.compact import Compact, place, replicate
from balancer.policies.problem import checked_number
from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Int, Problem

__all__ = ["eplb", "eplb_hierarchical", "physical_experts", "ranks"]


def eplb(problem: Problem) -> Layout:
    """Lay out by EPLB's global policy: replicate and pack over all servers.

    If all servers have the same slots and speed, server loads are those of DeepSeek's program, which may put
    two replicas of an expert on a server. An exchange of equal loads separates them if possible; otherwise
    they count as one replica with the sum of their shares, and the second slot stays empty.

    Otherwise replicas of one expert never share a server (`compact.place`), all have equal shares, and the
    least loaded server is the one with the least load / speed.

    Time O(L * (E + P) * log(E + S)), memory O(L * S * E).
    """
    if _all_alike(problem):
        replicas = int(problem.asked_LS[0].sum())
        return _assign(problem.load_LE, replicas, 1, 1, problem.servers).layout(problem.servers)
    return _place_any(problem.load_LE, problem.slots_LS, problem.speeds_S).layout()


def eplb_hierarchical(
    problem: Problem, *, groups: int | None = None, nodes: int | None = None
) -> Layout:
    """Lay out by EPLB's hierarchical policy: groups to nodes, then the global policy within each node.

    If `nodes` does not divide `groups` this is the global policy, as in DeepSeek's program. Servers are
    numbered node after node.

    Args:
        problem: What to plan.
        groups: Expert groups (of E / groups experts each); by default the greatest common divisor of E and 8,
            DeepSeek-V3's number.
        nodes: Nodes (of S / nodes servers each); by default the most that divide groups and servers and have
            enough slots.

    Raises:
        ValueError: A knob is not a whole number of at least 1, groups does not divide E, nodes does not
            divide S, or a node has too few slots.

    Time and memory as for `eplb`.
    """
    experts, servers = problem.experts, problem.servers
    if groups is None:
        groups = math.gcd(8, experts)
    checked_number("groups", groups, least=1, whole=True)
    if experts % groups:
        raise ValueError(f"groups is {groups}, must divide {experts} experts")
    if nodes is None:
        nodes = next(n for n in range(groups, 0, -1) if _fits(problem, groups, n))
    checked_number("nodes", nodes, least=1, whole=True)
    if servers % nodes:
        raise ValueError(f"nodes is {nodes}, must divide {servers} servers")
    if groups % nodes:
        return eplb(problem)
    if not _fits(problem, groups, nodes):
        raise ValueError(f"slots: a node of {nodes} cannot cover {experts // nodes} experts")
    if _all_alike(problem):
        replicas = int(problem.asked_LS[0].sum())
        return _assign(problem.load_LE, replicas, groups, nodes, servers).layout(servers)
    return _place_in_nodes(problem, groups, nodes)


def physical_experts(
    load_LE: Float, replicas: int, groups: int, nodes: int, servers: int
) -> tuple[Int, Int, Int]:
    """Compute physical experts by DeepSeek's hierarchical algorithm (global with one group and one node).

    Args:
        load_LE: float64 (L, E).
        replicas: P, a multiple of servers.
        groups: A divisor of E.
        nodes: A divisor of groups and of servers.
        servers: S.

    Returns:
        expert_LP: int64 (L, P): the logical expert of each physical expert.
        rank_LP: int64 (L, P): its index among that expert's replicas.
        count_LE: int64 (L, E).
    """
    made = _assign(load_LE, replicas, groups, nodes, servers)
    place_LP = _places(made.value_LP, made.server_LP)
    order_LP = _inverse(made.server_LP * (replicas // servers) + place_LP)
    return (
        np.take_along_axis(made.expert_LP, order_LP, 1),
        np.take_along_axis(ranks(made.expert_LP), order_LP, 1),
        made.count_LE,
    )


@dataclass(frozen=True, eq=False)
class _Assigned:
    """Replicas assigned to slots, node after node; within a node each expert's first replica comes first.

    Attributes:
        expert_LP: int64 (L, P): logical expert.
        value_LP: float64 (L, P): load.
        server_LP: int64 (L, P).
        count_LE: int64 (L, E).
    """

    expert_LP: Int
    value_LP: Float
    server_LP: Int
    count_LE: Int

    def layout(self, servers: int) -> Layout:
        """Convert to a layout; two replicas of an expert on a server have the sum of their shares."""
        layers, experts = self.count_LE.shape
        row_LP = np.arange(layers)[:, None] * servers + self.server_LP
        share_LP = 1.0 / np.take_along_axis(self.count_LE, self.expert_LP, 1)
        return Layout.of_replicas(
            (layers, servers, experts), row_LP.ravel(), self.expert_LP.ravel(), share_LP.ravel()
        )


def _assign(load_LE: Float, replicas: int, groups: int, nodes: int, servers: int) -> _Assigned:
    """Run the hierarchical algorithm; arguments as of `physical_experts`."""
    layers, experts = load_LE.shape
    in_group, in_node = experts // groups, experts // nodes
    rows = layers * nodes
    # The reference computes in float32, which decides its ties.
    load_LE = load_LE.astype(np.float32).astype(np.float64)

    # Step 1: groups to nodes.
    of_group = load_LE.reshape(layers, groups, in_group).sum(axis=2)
    at_LE = _by_node(of_group.astype(np.float32).astype(np.float64), nodes, experts)
    expert_at_LE = _inverse(at_LE)

    # Step 2: replicas within each node.
    load_NE = np.ascontiguousarray(np.take_along_axis(load_LE, expert_at_LE, 1)).reshape(rows, -1)
    extra = (replicas - experts) // nodes
    count_NE = np.empty((rows, in_node), dtype=np.int64)
    picks_NX = np.empty((rows, extra), dtype=np.int64)
    extra_N = np.full(rows, extra)
    compiled.replicate(load_NE, extra_N, replicas, True, count_NE, picks_NX)
    whose_NP = np.concatenate([np.tile(np.arange(in_node), (rows, 1)), picks_NX], axis=1)

    # Step 3: replicas to servers.
    value_NE = (load_NE.astype(np.float32) / count_NE.astype(np.float32)).astype(np.float64)
    value_NP = np.ascontiguousarray(np.take_along_axis(value_NE, whose_NP, 1))
    per_node = servers // nodes
    server_NP = _pack(value_NP, per_node)
    compiled.separate(value_NP, whose_NP, in_node, per_node, server_NP)
    # Servers are numbered over all nodes.
    node_N = np.tile(np.arange(nodes), layers)[:, None]
    expert_LP = (whose_NP + node_N * in_node).reshape(layers, -1)
    return _Assigned(
        expert_LP=np.take_along_axis(expert_at_LE, expert_LP, 1),
        value_LP=value_NP.reshape(layers, -1),
        server_LP=(server_NP + node_N * per_node).reshape(layers, -1),
        count_LE=np.take_along_axis(count_NE.reshape(layers, -1), at_LE, 1),
    )


def _pack(value_NP: Float, packs: int) -> npt.NDArray[np.int32]:
    """int32 (N, P): the pack of each item, with as many items in each pack.

    Items go heaviest first to the lightest pack with free capacity, the first of equals.
    """
    rows, items = value_NP.shape
    if items == packs:
        return np.tile(np.arange(items, dtype=np.int32), (rows, 1))
    pack_NP = np.full((rows, items), -1, np.int32)
    each_NP, slots_NS = np.ones((rows, items), np.int64), np.full((rows, packs), items // packs)
    compiled.place(value_NP, each_NP[None], slots_NS[None], np.ones(packs), True, pack_NP[None])
    return pack_NP


def _places(value_NP: Float, pack_NP: Int) -> Int:
    """int64 (N, P): the number of each item in its pack, heaviest first, the first of equals."""
    order_NP = np.argsort(-value_NP, axis=1, kind="stable")
    place_NP = np.empty_like(pack_NP)
    np.put_along_axis(place_NP, order_NP, ranks(np.take_along_axis(pack_NP, order_NP, 1)), 1)
    return place_NP


def _by_node(load_LG: Float, nodes: int, experts: int) -> Int:
    """int64 (L, E): positions of experts, node after node, if groups of these loads are packed to nodes."""
    layers, groups = load_LG.shape
    node_LG = _pack(load_LG, nodes).astype(np.int64)
    first_LG = (node_LG * (groups // nodes) + _places(load_LG, node_LG)) * (experts // groups)
    at_LE: Int = (first_LG[:, :, None] + np.arange(experts // groups)).reshape(layers, experts)
    return at_LE


def ranks(expert_LP: Int) -> Int:
    """(L, P): index of each replica among the replicas of its expert, in order."""
    order_LP = np.argsort(expert_LP, axis=1, kind="stable")
    sorted_LP = np.take_along_axis(expert_LP, order_LP, 1)
    step = np.arange(expert_LP.shape[1])
    begins_LP = np.zeros_like(sorted_LP)
    begins_LP[:, 1:] = np.where(sorted_LP[:, 1:] != sorted_LP[:, :-1], step[1:], 0)
    rank_LP = np.empty_like(sorted_LP)
    np.put_along_axis(rank_LP, order_LP, step - np.maximum.accumulate(begins_LP, axis=1), 1)
    return rank_LP


def _inverse(permutation_NP: Int) -> Int:
    inverse_NP = np.empty_like(permutation_NP)
    positions = np.broadcast_to(np.arange(permutation_NP.shape[1]), permutation_NP.shape)
    np.put_along_axis(inverse_NP, permutation_NP, positions, 1)
    return inverse_NP


def _place_any(load_LE: Float, slots_LS: Int, speeds_S: Float) -> Compact:
    count_LE = replicate(load_LE, slots_LS.sum(axis=1), len(speeds_S))
    return place(load_LE, count_LE, slots_LS, speeds_S)


def _place_in_nodes(problem: Problem, groups: int, nodes: int) -> Layout:
    layers, experts, servers = problem.layers, problem.experts, problem.servers
    in_node, per_node = experts // nodes, servers // nodes
    load_LG = problem.load_LE.reshape(layers, groups, -1).sum(axis=2)
    expert_LNE = _inverse(_by_node(load_LG, nodes, experts)).reshape(layers, nodes, in_node)
    found: list[tuple[Int, Int, Float]] = []
    for node in range(nodes):
        here = slice(node * per_node, (node + 1) * per_node)
        expert_LE = expert_LNE[:, node]
        part = _place_any(
            np.ascontiguousarray(np.take_along_axis(problem.load_LE, expert_LE, 1)),
            np.ascontiguousarray(np.minimum(problem.slots_LS[:, here], in_node)),
            np.ascontiguousarray(problem.speeds_S[here]),
        ).layout()
        layer_N, server_N = np.divmod(part.row_N, per_node)
        row_N = layer_N * servers + node * per_node + server_N
        found.append((row_N, expert_LE[layer_N, part.expert_N], part.share_N))
    row_R, expert_R, share_R = (np.concatenate(each) for each in zip(*found, strict=True))
    return Layout.of_replicas((layers, servers, experts), row_R, expert_R, share_R)


def _all_alike(problem: Problem) -> bool:
    asked_LS, speeds_S = problem.asked_LS, problem.speeds_S
    return bool((asked_LS == asked_LS[0, 0]).all() and (speeds_S == speeds_S[0]).all())


def _fits(problem: Problem, groups: int, nodes: int) -> bool:
    if groups % nodes or problem.servers % nodes:
        return False
    in_node = problem.experts // nodes
    slots_LNS = problem.slots_LS.reshape(problem.layers, nodes, -1)
    return bool((np.minimum(slots_LNS, in_node).sum(axis=2) >= in_node).all())
