"""The routing that dispatch policies are compared under."""

from __future__ import annotations

import numpy as np

from benchmarks.dispatch import Plan
from benchmarks.dispatch.policies import skewed_request

PLAN = Plan(
    transports=("shm",), hidden=(8,), tokens=(1,), rounds=1, with_server=False, top_k=4,
    num_experts=16,
)  # fmt: skip


def test_experts_of_a_token_are_distinct_and_low_ones_are_wanted_more() -> None:
    ids_TK = skewed_request(PLAN, 8, 2000, seed=1).ids_TK
    assert all(len(set(row)) == PLAN.top_k for row in ids_TK.tolist())
    count_E = np.bincount(ids_TK.ravel(), minlength=PLAN.num_experts)
    assert count_E[0] > 1.2 * count_E[1] > 1.2 * count_E[4] > count_E[15] > 0


def test_the_same_seed_draws_the_same() -> None:
    first, again, other = (skewed_request(PLAN, 8, 50, seed).ids_TK for seed in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).any()
