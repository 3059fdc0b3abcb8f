"""Routing arithmetic: who computes a token, what happens when too many go to one expert, what it costs.

    gating    logits -> experts and weights of each token
    capacity  a limit on the tokens of an expert: drop or spill what is over it
    token_ids ids of each token's experts -> counts, and how to tell the two apart
    balance   loads of servers -> balancedness, the straggler's time, replicas that help

Plain functions over numpy arrays that say in a few lines what engines compute in kernels; nothing on the
data path uses them. Letters: T tokens, K experts per token, E experts, S servers, H hidden, C choices.
"""

from eaas.routing.balance import (
    allocate_replicas,
    balancedness,
    pack_longest_first,
    redundancy_bytes,
    replica_loads,
    straggler_time,
    total_variation,
)
from eaas.routing.capacity import drop_over_capacity, expert_capacity, spill_over_capacity
from eaas.routing.gating import combine, route_grouped, route_topk, softmax
from eaas.routing.token_ids import are_token_ids, count_token_ids

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
