"""Plans at intervals, and at once when the load has drifted."""

from __future__ import annotations

import numpy as np
import pytest

from balancer.live.triggers import Triggers, total_variation

L, E, S = 4, 16, 4


def load(rng: np.random.Generator, part_LE: np.ndarray, tokens: int = 4000) -> np.ndarray:
    return np.stack([rng.multinomial(tokens, p_E) for p_E in part_LE]).astype(float)


def distribution(seed: int) -> np.ndarray:
    part_LE = np.random.default_rng(seed).lognormal(0, 1, (L, E))
    return part_LE / part_LE.sum(axis=1, keepdims=True)


def test_stationary_traffic_is_no_drift() -> None:
    rng, part_LE = np.random.default_rng(2), distribution(1)
    triggers = Triggers(10_000, 20)
    triggers.planned(load(rng, part_LE), 1.05)
    for tokens in (30, 300, 3000):
        for _ in range(300):
            assert triggers.stepped(load(rng, part_LE, tokens), 1.1, S) is None


def test_another_load_is_drift_at_once() -> None:
    rng = np.random.default_rng(3)
    triggers = Triggers(100, 80)
    triggers.planned(load(rng, distribution(1)), 1.05)
    for _ in range(triggers.recent - 1):
        assert triggers.stepped(load(rng, distribution(2)), 1.1, S) is None
    trigger, why = triggers.stepped(load(rng, distribution(2)), 1.1, S) or ("", "")
    assert trigger == "drift"
    assert "total variation" in why


def test_a_rise_of_the_par_is_drift() -> None:
    """A server became slow; the load is unchanged."""
    rng, part_LE = np.random.default_rng(4), distribution(1)
    triggers = Triggers(100, 80)
    triggers.planned(load(rng, part_LE), 1.05)
    told = [triggers.stepped(load(rng, part_LE), 1.5, S) for _ in range(triggers.recent)]
    assert told[-1] is not None
    assert told[-1][0] == "drift"
    assert told[-1][1].startswith("PAR 1.50, 1.05")


def test_total_variation() -> None:
    one = np.array([[1.0, 0.0], [2.0, 2.0]])
    assert total_variation(one, 10 * one) == 0
    assert total_variation(one, one[:, ::-1]) == pytest.approx(0.5)
    assert total_variation(one, np.zeros((2, 2))) == 0
