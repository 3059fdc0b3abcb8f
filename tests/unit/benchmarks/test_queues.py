"""The simulation of clients that share servers."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.queues.world import KNOWLEDGE, Guests, Situation, simulate

COUNTS_ILE = np.full((2, 2, 8), 4, np.uint16)
# Of two servers, each has all experts.
BOTH_LSE = np.full((2, 2, 8), 0.5, np.float32)


def mean_s(situation: Situation, knowledge: str, calls: int = 300) -> float:
    took = simulate(situation, knowledge, COUNTS_ILE, BOTH_LSE, tokens=64, calls=calls, seed=1)
    assert len(took) == calls - calls // 5
    return float(took.mean())


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_a_client_alone_takes_the_time_of_its_work(knowledge: str) -> None:
    # 512 pairs take as long as 64 loads; at least 8 loads more, and at best all is divided evenly.
    alone = mean_s(Situation("alone", 1, 1e-3), knowledge)
    assert 0.5 * (64 + 8) * 1e-4 <= alone <= 1.3 * 0.5 * (64 + 16) * 1e-4


def test_knowing_the_queue_avoids_a_server_that_serves_others() -> None:
    busy = Situation("busy", 1, 1e-3, guests=Guests(1, every_s=8e-3, takes_s=5e-3))
    assert mean_s(busy, "oracle") < mean_s(busy, "queues") < 0.95 * mean_s(busy, "work")


def test_a_slow_server_gets_less() -> None:
    slow = Situation("slow", 1, 1e-3, slow=(3.0,))
    assert mean_s(slow, "queues") < 0.7 * mean_s(slow, "shares")
