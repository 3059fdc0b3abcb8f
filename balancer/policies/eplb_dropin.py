"""Drop-in for DeepSeek's EPLB program, for other programs: `rebalance_experts` with the same arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from balancer.policies.compact import place, replicate
from balancer.policies.eplb import physical_experts, ranks
from balancer.policies.problem import checked_load, checked_number, like
from balancer.policies.types import Float, Int

__all__ = ["rebalance_experts"]

# Far above any cluster, so that one wrong number cannot allocate all memory.
_MOST = 1 << 20


def rebalance_experts(
    weight: Any,
    num_replicas: int,
    num_groups: int | None,
    num_nodes: int,
    num_gpus: int,
    *,
    enable_hierarchical: bool | None = None,
) -> tuple[Any, Any, Any]:
    """Place replicas with the counts and GPU loads of DeepSeek's `rebalance_experts`.

    The policy is hierarchical if num_nodes divides num_groups, else global, as in DeepSeek's program. Two
    replicas of an expert share a GPU only if no exchange of equal loads separates them. If num_gpus does not
    divide num_replicas, which DeepSeek's program refuses, the policy is global, the first GPUs hold one
    replica more, and replicas of one expert never share a GPU.

    Args:
        weight: (L, E) loads; a torch tensor of any type on any device, or anything that numpy reads.
        num_replicas: P, at least E; physical experts count GPU after GPU.
        num_groups: Expert groups; may be None if the policy is global.
        num_nodes: Nodes.
        num_gpus: S.
        enable_hierarchical: SGLang's argument: choose the hierarchical (True) or the global policy (False).

    Returns:
        phy2log: int64 (L, P): the expert of each physical expert.
        log2phy: int64 (L, E, X): the physical experts of each expert, padded with -1; X is the highest count.
        logcnt: int64 (L, E): replicas of each expert.

        They are tensors on the CPU if weight is a tensor, wherever it is, as from DeepSeek's program; else
        arrays.

    Raises:
        ValueError: Shapes or numbers are wrong; the message names the argument.
    """
    load_LE = checked_load("weight", weight, 2)
    experts = load_LE.shape[1]
    for name, value in (
        ("num_replicas", num_replicas),
        ("num_nodes", num_nodes),
        ("num_gpus", num_gpus),
    ):
        checked_number(name, value, least=1, most=_MOST, whole=True)
    if num_groups is not None or enable_hierarchical is not False:
        checked_number("num_groups", num_groups, least=1, most=_MOST, whole=True)
    if num_replicas < experts:
        raise ValueError(f"num_replicas: {num_replicas} replicas cannot cover {experts} experts")
    groups, nodes = num_groups or 1, num_nodes
    if enable_hierarchical and groups % nodes:
        raise ValueError(f"num_groups is {groups}, must be a multiple of {nodes} nodes")
    if enable_hierarchical is False or groups % nodes:
        groups = nodes = 1
    if experts % groups:
        raise ValueError(f"num_groups is {groups}, must divide {experts} experts")
    if num_gpus % nodes:
        raise ValueError(f"num_nodes is {nodes}, must divide {num_gpus} GPUs")
    if num_replicas % num_gpus:
        found = _any_number(load_LE, num_replicas, num_gpus)
    else:
        phy2log, rank_LP, logcnt = physical_experts(load_LE, num_replicas, groups, nodes, num_gpus)
        found = phy2log, _physical_of(phy2log, rank_LP, logcnt), logcnt
    return like(weight, *found)


def _any_number(load_LE: Float, replicas: int, gpus: int) -> tuple[Int, Int, Int]:
    layers, experts = load_LE.shape
    if replicas > experts * gpus:
        raise ValueError(f"num_replicas is {replicas}: {gpus} GPUs have {experts * gpus} at most")
    slots_S = np.full(gpus, replicas // gpus) + (np.arange(gpus) < replicas % gpus)
    slots_LS = np.tile(np.minimum(slots_S, experts), (layers, 1))
    total_L = slots_LS.sum(axis=1)
    if total_L[0] < replicas:
        raise ValueError(f"num_replicas is {replicas}: more than {experts} experts on a GPU")
    placed = place(load_LE, replicate(load_LE, total_L, gpus), slots_LS, np.ones(gpus))
    phy2log = placed.layout().expert_N.reshape(layers, replicas).astype(np.int64)
    return phy2log, _physical_of(phy2log, ranks(phy2log), placed.count_LE), placed.count_LE


def _physical_of(expert_LP: Int, rank_LP: Int, count_LE: Int) -> Int:
    layers, replicas = expert_LP.shape
    physical_LEX = np.full((*count_LE.shape, int(count_LE.max())), -1)
    physical_LEX[np.arange(layers)[:, None], expert_LP, rank_LP] = np.arange(replicas)
    return physical_LEX
