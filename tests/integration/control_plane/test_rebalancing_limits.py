"""What bounds a rebalance: knobs that follow what is seen, memory, nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from control_plane import MetricsServer, Plane, eventually
from eaas.errors import ClusterError, ConfigError
from rebalancing_box import HOT, NAMES, Box, L

pytestmark = pytest.mark.integration


TOKENS = itertools.count(1)


def metrics() -> bytes:
    """Each token took 40 ms, and there is one more at each look."""
    n, name = next(TOKENS), "vllm:inter_token_latency_seconds"
    return f"# TYPE {name} histogram\n{name}_sum {0.04 * n}\n{name}_count {n}\n".encode()


def test_live_knobs_follow_what_is_seen_and_say_so(
    start_box: Callable[..., Box], plane: Plane
) -> None:
    box = start_box(
        policy="scalpel",
        knobs="live",
        latency_target_ms=40.0,
        link_bytes_per_s=1_000_000,
    )
    endpoint = MetricsServer(metrics)
    plane.stack.callback(endpoint.close)
    plane.client(box.monitor, endpoint.address)
    settings = lambda: box.balancer.rebalancer.settings  # noqa: E731

    def busy_link() -> bool:
        box.servers["s2"].sent_bytes += 100_000_000
        return settings().tuned.get("budget") == 1

    # At its target the balance is tight, on links that are full few experts move.
    eventually(lambda: settings().tuned.get("drift_tol") == 0.05)
    eventually(lambda: settings().tuned["budget"] == 10)
    eventually(busy_link)
    assert settings().tuned["heavy_frac"] == 0.25
    # What else a busy machine makes of the load may be said in the same breath.
    told = next(
        e for e in box.client.history() if e.trigger == "knobs" and "budget 10 -> 1" in e.reason
    )
    assert told.knobs["budget"] == 1
    assert "links are 100% full" in told.reason
    # What an operator says comes first.
    box.client.set_policy("scalpel", {"budget": 3})
    assert settings().knobs == {"budget": 3}
    eventually(lambda: settings().tuned["budget"] == 10)


def test_memory_is_kept_to_at_every_moment(plane: Plane) -> None:
    """A replica has 1,000 bytes; each server has room for one in each layer more than it starts with."""
    address = plane.monitor().address
    balancer = plane.balancer(
        address, expected_servers=4, redundancy=1, num_redundant_experts=4, step_s=0.1
    )
    room = L * 3
    servers = [plane.server(address, name, memory_bytes=1000 * room) for name in NAMES]
    box = Box(balancer, servers)
    plane.stack.callback(box.client.close)
    eventually(lambda: box.client.placement() is not None and box.at_rest())
    # How large replicas are is known once servers were asked.
    eventually(lambda: balancer.rebalancer.load.expert_bytes)
    most = 0
    for turn in (HOT, HOT[::-1], HOT[4:] + HOT[:4]):
        epoch = box.placement().epoch
        box.hot = turn
        many = [[1000 * n for n in turn]] * L
        plan = box.client.plan("fractional", loads_LE=many)
        stages = box.client.apply(plan.plan_id).stages
        eventually(lambda: box.placement().epoch == epoch + stages and box.at_rest())  # noqa: B023
        most = max(most, stages)
    assert most > 1, "more than one stage was needed"
    assert all(server.most <= room for server in servers), [s.most for s in servers]


def test_a_node_budget_is_kept_to(plane: Plane, start_box: Callable[..., Box]) -> None:
    """s1 and s2 on one node, the others on another one: one expert of a layer may have replicas on both."""
    box = start_box(policy="fractional", node_budget=1, step_interval=10)

    def cross_node_L() -> Any:
        holds_LSE = box.placement().holds_LSE
        return (holds_LSE[:, :2].any(axis=1) & holds_LSE[:, 2:].any(axis=1)).sum(axis=1)

    eventually(lambda: box.par() < 1.3 and box.at_rest())
    assert cross_node_L().max() == 1
    with pytest.raises(ClusterError, match="node_budget is set, and eplb knows no nodes"):
        box.client.set_policy("eplb")
    with pytest.raises(ClusterError, match="knows no nodes"):
        box.client.plan("eplb")
    with pytest.raises(ConfigError, match="node_budget is set, and spread knows no nodes"):
        plane.balancer(box.monitor, policy="spread", node_budget=0)
    with pytest.raises(ConfigError, match=r"balancer\.policy: policy 'best' is none of"):
        plane.balancer(box.monitor, policy="best")
