"""Routing arithmetic: who computes a token, what happens when too many go to one expert, what it costs.

    gating    logits -> experts and weights of each token
    capacity  a limit on the tokens of an expert: drop or spill what is over it
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
)
from eaas.routing.capacity import drop_over_capacity, expert_capacity, spill_over_capacity
from eaas.routing.gating import combine, route_grouped, route_topk, softmax

__all__ = [
    "allocate_replicas",
    "balancedness",
    "combine",
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
]
