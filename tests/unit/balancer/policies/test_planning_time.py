"""Planning is much faster than plain loops like DeepSeek's.

A loose guard, relative to a plain loop on the same machine; `python -m benchmarks.policies` measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from balancer.policies import names, plan

LAYERS, EXPERTS = 58, 256


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The least of some rounds, of this thread's processor time."""
    spent = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        spent.append(time.thread_time() - began)
    return min(spent)


def plain_eplb(load_E: np.ndarray, servers: int, slots: int) -> list[int]:
    """DeepSeek's loops over replicas and servers for one layer; the experts of all servers."""
    count = [1] * len(load_E)
    owners = list(range(len(load_E)))
    for _ in range(slots - len(load_E)):
        hottest = max(range(len(load_E)), key=lambda e: load_E[e] / count[e])
        count[hottest] += 1
        owners.append(hottest)
    filled, held = [0.0] * servers, [0] * servers
    for expert in sorted(owners, key=lambda e: -load_E[e] / count[e]):
        room = (s for s in range(servers) if held[s] < slots // servers)
        server = min(room, key=lambda s: filled[s])
        filled[server] += load_E[expert] / count[expert]
        held[server] += 1
    return held


@pytest.mark.parametrize(("servers", "slots"), [(64, 320), (288, 576)])
def test_every_policy_is_much_faster_than_a_plain_loop(servers: int, slots: int) -> None:
    rng = np.random.default_rng(0)
    load_LE = rng.lognormal(0, 1, (LAYERS, EXPERTS))
    later_LE = load_LE * rng.lognormal(0, 0.3, load_LE.shape)
    plain_s = LAYERS * seconds(lambda: plain_eplb(load_LE[0].tolist(), servers, slots), 3)
    for policy in names():
        first = plan(policy, load_LE, servers, slots)
        for current in (None, first, first.holds_LSE):
            again = partial(plan, policy, later_LE, servers, slots, current=current)
            assert seconds(again, 4) < plain_s / 12, policy
