"""Routing arithmetic in plain NumPy, for explanation: gating, expert capacity, cost of uneven load.

    gating    logits -> experts and weights of each token
    capacity  a limit on the tokens of an expert: drop or spill the tokens over it
    token_ids ids of each token's experts -> counts, and a test that distinguishes ids from counts
    balance   loads of servers -> balancedness, the straggler's time, replicas that help

These functions show in a few lines what engines compute in kernels; the data path does not use them.
Letters: T tokens, K experts per token, E experts, S servers, H hidden, C choices.
"""

from balancer.policies.token_ids import are_token_ids, count_token_ids
from balancer.policies.window import total_variation
from simulator.routing.balance import (
    allocate_replicas,
    balancedness,
    pack_longest_first,
    redundancy_bytes,
    replica_loads,
    straggler_time,
)
from simulator.routing.capacity import drop_over_capacity, expert_capacity, spill_over_capacity
from simulator.routing.gating import combine, route_grouped, route_topk, softmax

__all__ = [
    "allocate_replicas",
    "are_token_ids",
    "balancedness",
    "combine",
    "count_token_ids",
    "drop_over_capacity",
    "expert_capacity",
    "pack_longest_first",
    "redundancy_bytes",
    "replica_loads",
    "route_grouped",
    "route_topk",
    "softmax",
    "spill_over_capacity",
    "straggler_time",
    "total_variation",
]
