"""The balancer's metrics."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import generate_latest

from balancer.live.hotness import Reading, Work
from balancer.live.state import LoadState
from balancer.live.tuning import Signals
from balancer.metrics import BalancerMetrics
from balancer.planner.layout import Settings
from eaas.config import BalancerConfig
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member, MemberState, Placement, Role

L, E = 2, 4


def member(name: str) -> Member:
    return Member(name, Role.EXPERT_SERVER, 1, "h", f"{name}:1", MemberState.SERVING)


def test_the_figures_of_a_placement_and_its_load() -> None:
    load = LoadState(BalancerConfig())
    holds_LSE = np.zeros((L, 2, E), bool)
    holds_LSE[:, 0, :2] = holds_LSE[:, 1, 2:] = True
    placement = Placement(5, ("a", "b"), holds_LSE, holds_LSE.astype(np.float32))
    now = [10.0]
    wanted = Settings(policy="eplb", tuned={"k": 0.5, "budget": 3})
    signals = Signals(burstiness=0.1, link_load=0.75)
    metrics = BalancerMetrics(load, lambda: wanted, lambda: signals, lambda: now[0])
    assert b"eaas_balancer_epoch" not in generate_latest(metrics.registry)
    metrics.published(placement)
    tokens = {"a": np.array([[30, 30, 0, 0]] * L), "b": np.array([[0, 0, 10, 10]] * L)}
    members = {name: member(name) for name in ("a", "b")}
    for n in (0, 1):
        readings = {s: Reading(1, n + 1, n * t, Work(float(n))) for s, t in tokens.items()}
        load.stepped(readings, members, placement, 1000)
    now[0] = 13.0

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"eaas_balancer_{name}", labels)

    assert value("epoch") == 5
    assert value("epoch_age_seconds") == 3.0
    assert value("par", layer="1") == pytest.approx(1.5)
    assert value("balancedness", layer="1") == pytest.approx(1 / 1.5)
    assert value("gap", layer="0") == pytest.approx(1.5)
    assert value("server_tokens", server="a") == 60 * L
    assert value("server_speed", server="a") == 1.0
    assert value("hotness", layer="1", expert="0") == 30
    assert value("knob", knob="budget") == 3
    assert value("signal", signal="link_load") == 0.75
    assert value("signal", signal="latency") is None
    assert (metrics.balancedness_L() == 1 / 1.5).all()

    entry = pb.HistoryEntry(
        trigger="drift", verdict=pb.VERDICT_MOVES, transit=3, bytes=3000, plan_s=0.5
    )
    metrics.entry(entry)
    entry.prepare_s, entry.retire_s = 2.0, 1.0
    metrics.entry(entry)
    assert value("decisions_total", trigger="drift", verdict="moves") == 1
    assert value("moves_total") == 3
    assert value("moved_bytes_total") == 3000
    for phase, seconds in (("plan", 0.5), ("prepare", 2.0), ("retire", 1.0)):
        assert value("phase_seconds_sum", phase=phase) == seconds
    assert b"eaas_balancer_hotness" in generate_latest(metrics.registry)
