"""Choice of nodes and resources for a cluster on Ray."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.config import load_config
from eaas.errors import ConfigError
from eaas_cli.commands.up_on_ray import reserved
from eaas_cli.local.memory import MemoryNeed
from eaas_cli.ray.placement import (
    Node,
    actor_options,
    least_loaded,
    live_nodes,
    monitor_candidates,
    refuse_open_network,
)

HEAD, A, B, C = (Node(name, f"10.0.0.{i}", i == 0) for i, name in enumerate("habc"))


def test_the_head_is_first_and_dead_nodes_are_left_out() -> None:
    def row(node: Node, alive: bool = True) -> dict[str, object]:
        resources = {"CPU": 2.0} | ({"node:__internal_head__": 1.0} if node.is_head else {})
        return {
            "NodeID": node.node_id,
            "NodeManagerAddress": node.address,
            "Alive": alive,
            "Resources": resources,
        }

    assert live_nodes([row(B), row(A, alive=False), row(HEAD), row(C)]) == [HEAD, B, C]


def test_the_monitor_may_move_to_three_nodes_with_different_addresses() -> None:
    same = Node("z", HEAD.address, False)
    assert monitor_candidates([HEAD, A, B, C], own="b") == [HEAD, B, A]
    assert monitor_candidates([HEAD, same, A], own="h") == [HEAD, A]
    assert least_loaded([], ["a"]) is None


@given(st.integers(1, 5), st.integers(0, 30))
def test_servers_are_even_over_the_nodes(nodes: int, servers: int) -> None:
    all_nodes = [Node(str(i), f"10.0.0.{i}", i == 0) for i in range(nodes)]
    places: list[str] = []
    for _ in range(servers):
        node = least_loaded(all_nodes, places)
        assert node is not None
        places.append(node)
    counts = Counter({node.node_id: 0 for node in all_nodes}) + Counter(places)
    found = [counts[node.node_id] for node in all_nodes]
    assert max(found) - min(found) <= 1
    # Ray's head gets the last of a round.
    assert counts["0"] == servers // nodes


def test_an_actor_prefers_a_node_and_takes_another() -> None:
    options = actor_options({"CPU": 4, "memory": 1e9, "expert_server": 1}, ["a"])
    assert options == {
        "num_cpus": 4,
        "num_gpus": 0,
        "memory": 10**9,
        "resources": {"expert_server": 1},
        "label_selector": {"ray.io/node-id": "in(a)"},
        "fallback_strategy": [{"label_selector": {}}],
    }
    assert "label_selector" not in actor_options({}, [])


def test_several_nodes_need_tls_or_insecure() -> None:
    assert refuse_open_network([HEAD], has_tls=False, insecure=False)
    assert not refuse_open_network([HEAD, A], has_tls=True, insecure=False)
    assert not refuse_open_network([HEAD, A], has_tls=False, insecure=True)
    with pytest.raises(ConfigError, match=r"2 nodes.*--tls DIR.*--insecure"):
        refuse_open_network([HEAD, A], has_tls=False, insecure=False)


NEED = MemoryNeed(experts=8 << 30, replicas=2, others=1 << 30)


def test_a_server_reserves_its_experts_memory_or_a_gpu() -> None:
    on_cpu = reserved(load_config(), NEED, 4)
    assert on_cpu["expert_server"]["memory"] > 4 << 30
    assert "GPU" not in on_cpu["expert_server"]
    device = {"device": "cuda"}
    on_gpu = reserved(load_config(expert_server=device), NEED, 4)
    assert on_gpu["expert_server"]["GPU"] == 1
    assert on_gpu["expert_server"]["memory"] < 1 << 30
    assert on_gpu["attention_client"] == on_cpu["attention_client"]
    settings = load_config(expert_server=device, ray={"expert_server": {"GPU": 0.5}})
    assert reserved(settings, NEED, 4)["expert_server"]["GPU"] == 0.5
