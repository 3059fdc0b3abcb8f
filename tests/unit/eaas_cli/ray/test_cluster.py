"""The controller replaces lost actors and scales; the roles' arguments suit every node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eaas.config import ClusterConfig
from eaas.errors import ClusterError
from eaas_cli.local.interface import MONITOR
from eaas_cli.ray.cluster import CONTROLLER, ClusterSpec, RayCluster, stop_all_roles
from eaas_cli.ray.controller import Controller
from eaas_cli.ray.placement import Node
from eaas_cli.ray.pool import Actor, ActorPool
from eaas_cli.ray.role import Report, RoleSpec
from hand_clock import HandClock

pytest.importorskip("ray", reason="needs the extra `ray`")
HEAD, A, B = (Node(name, f"10.0.0.{i}", i == 0) for i, name in enumerate("hab"))


class Pool(ActorPool):
    """Actors that serve as soon as they are polled, without Ray."""

    def __init__(self, fail: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.specs: dict[str, RoleSpec] = {}
        self.options: dict[str, Mapping[str, Any]] = {}
        self.ended: list[str] = []
        self.waiting: set[str] = set()
        self.fail = dict(fail or {})

    def adopt(self) -> None:
        pass

    def create(self, name: str, actor: type, argument: Any, options: Mapping[str, Any]) -> None:
        self.specs[name], self.options[name] = argument, options
        self.actors.setdefault(name, Actor(name, self)).begin(None)
        self.waiting.discard(name)

    def poll(self, timeout_s: float) -> None:
        for name, actor in self.actors.items():
            if actor.report is None and not actor.lost and name not in {CONTROLLER, *self.waiting}:
                wanted = self.options[name]["label_selector"]["ray.io/node-id"]
                failure = self.fail.get(name)
                address = None if failure else "10.0.0.0:7000"
                node = wanted.removeprefix("in(").removesuffix(")")
                actor.report = Report(node, "10.0.0.0", 5, address, None, 0, failure, False, 0)

    def stop(self, names: Iterable[str], grace_s: float = 0.0) -> None:
        for name in list(names):
            self.kill(name)

    def kill(self, name: str) -> None:
        if self.actors.pop(name, None) is not None:
            self.ended.append(name)

    def leave(self, name: str) -> None:
        report = self.actors[name].report
        assert report is not None
        self.actors[name].report = replace(report, left=True)

    def lose(self, name: str) -> None:
        self.actors[name].report, self.actors[name].lost = None, True

    def wait_forever(self, name: str) -> None:
        """No node is left that the actor's selector names."""
        self.actors[name].report = None
        self.waiting.add(name)


def spec(**changes: Any) -> ClusterSpec:
    roles = ("monitor", "balancer", "expert-server", "attention-client", "frontend", "vllm")
    kinds = ("expert_server", "attention_client", "control")
    return ClusterSpec(
        **{
            "model": Path("/model"),
            "servers": 3,
            "redundancy": 2,
            "clients": 1,
            "engine": "transformers",
            "config": ClusterConfig(),
            "config_text": None,
            "flags": ("--insecure",),
            "environment": {role: {} for role in roles},
            "resources": {kind: {} for kind in kinds},
            "loopback": False,
            "home": "a",
            "candidates": (HEAD, A),
            "monitor_port": 7000,
        }
        | changes
    )


def started(pool: Pool, nodes: list[Node], **changes: Any) -> RayCluster:
    cluster = RayCluster(spec(**changes), pool, lambda: nodes, object)
    cluster.start(10.0)
    return cluster


def test_roles_join_every_address_of_the_monitor_and_servers_are_spread() -> None:
    pool = Pool()
    started(pool, [HEAD, A, B])
    for name, role in pool.specs.items():
        assert ("--join" in role.words) == (name != MONITOR)
        if name != MONITOR:
            join = role.words[role.words.index("--join") + 1]
            assert join == "10.0.0.0:7000,10.0.0.1:7000"
        assert role.words[-1] == "--insecure"
    places = {name: actor.report.node for name, actor in pool.actors.items() if actor.report}
    assert {places[f"expert-server-{i}"] for i in range(3)} == {"h", "a", "b"}
    assert (places[MONITOR], places["frontend"], places["attention-client-0"]) == ("h", "a", "a")
    # The monitor cannot go where members do not look for it.
    (others,) = pool.options[MONITOR]["fallback_strategy"]
    assert others["label_selector"] == {"ray.io/node-id": "in(h,a)"}
    assert pool.options["expert-server-0"]["fallback_strategy"] == [{"label_selector": {}}]


def test_on_one_node_members_stay_on_loopback() -> None:
    pool = Pool()
    started(pool, [HEAD], loopback=True, candidates=(HEAD,), home="h")
    assert {role.host for role in pool.specs.values()} == {"127.0.0.1"}
    words = pool.specs["balancer"].words
    assert words[words.index("--join") + 1] == "127.0.0.1:7000"


def test_a_failed_start_names_the_role_and_leaves_no_actor() -> None:
    pool = Pool(fail={"expert-server-1": "no such model"})
    with pytest.raises(ClusterError, match=r"expert-server-1 on 10\.0\.0\.0: no such model"):
        started(pool, [HEAD, A])
    assert not pool.actors


def test_roles_without_room_are_named() -> None:
    pool: Any = Pool()
    pool.poll = lambda timeout_s: None
    with pytest.raises(ClusterError, match=r"monitor \(no node of Ray has room for it"):
        RayCluster(spec(), pool, lambda: [HEAD], object).start(0.0)
    assert not pool.actors


def test_a_lost_monitor_moves_to_another_candidate_with_its_port() -> None:
    pool, nodes = Pool(), [HEAD, A, B]
    steered = Controller(started(pool, nodes), set)
    nodes.remove(HEAD)
    pool.lose(MONITOR)
    assert steered.step() == ["monitor was lost and is created again"]
    assert pool.options[MONITOR]["label_selector"] == {"ray.io/node-id": "in(a)"}
    words = pool.specs[MONITOR].words
    assert words[words.index("--port") + 1] == "7000"


def test_a_monitor_without_its_nodes_returns_with_one_of_their_addresses() -> None:
    pool, nodes, clock = Pool(), [HEAD, A, B], HandClock()
    steered = Controller(started(pool, nodes), set, clock)
    assert steered.step() == []
    nodes[:] = [B]
    pool.wait_forever(MONITOR)
    clock.now = 29.0
    assert steered.step() == []
    clock.now = 31.0
    with pytest.raises(ClusterError, match=r"members look for it at 10\.0\.0\.0 or 10\.0\.0\.1"):
        steered.step()
    # The controller steps again soon, with other work.
    assert steered.step() == []
    # Ray's head is started again: the same address, another id.
    nodes.append(replace(HEAD, node_id="new"))
    clock.now = 62.0
    assert steered.step() == ["monitor was lost and is created again"]
    assert pool.options[MONITOR]["label_selector"] == {"ray.io/node-id": "in(new)"}
    assert steered.step() == []
    clock.now = 100.0
    assert steered.step() == []


def test_it_scales_and_forgets_servers_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[str] = []

    class Balancer:
        def __init__(self, address: str, tls: object) -> None:
            assert address == "10.0.0.0:7000"

        def __enter__(self) -> Balancer:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def drain(self, server: str) -> None:
            drained.append(server)

    monkeypatch.setattr("eaas_cli.local.scaling.BalancerClient", Balancer)
    pool = Pool()
    cluster = started(pool, [HEAD, A, B])
    steered = Controller(cluster, lambda: {server.name for server in cluster.running_servers()})
    scaler = steered.scaler
    scaler.want(4)
    steered.step()
    assert "expert-server-3" in pool.actors
    steered.step()
    scaler.want(2)
    lines = []
    for _ in range(8):
        lines += steered.step()
        for name in drained:
            if name in pool.actors:
                pool.leave(name)
    assert drained == ["expert-server-3", "expert-server-2"]
    assert not {"expert-server-2", "expert-server-3"} & set(pool.actors)
    # A person drains one more.
    pool.leave("expert-server-0")
    assert steered.step() == ["expert-server-0 has left"]
    assert [server.name for server in cluster.running_servers()] == ["expert-server-1"]


def test_servers_started_by_hand_count() -> None:
    pool = Pool()
    cluster = started(pool, [HEAD, A, B])
    own = {"expert-server-0", "expert-server-1", "expert-server-2"}
    steered = Controller(cluster, lambda: own | {"by-hand"})
    steered.scaler.want(4)
    steered.step()
    assert len(cluster.running_servers()) == 3


def test_vllm_serves_the_endpoint_and_a_frontend_its_page() -> None:
    pool = Pool()
    cluster = started(pool, [HEAD, A], engine="vllm")
    assert (cluster.endpoint, cluster.page) == ("10.0.0.0:7000", "10.0.0.0:7000")
    assert "--page-only" in pool.specs["frontend"].words
    assert "attention-client-0" not in pool.specs
    stop_all_roles(pool)
    assert set(pool.ended[:2]) == {"frontend", "vllm"}
    # The monitor is the last to end.
    assert pool.ended[-1] == MONITOR
    assert not pool.actors
    without = Pool()
    config = ClusterConfig.model_validate({"frontend": {"dashboard": False}})
    started(without, [HEAD, A], engine="vllm", config=config)
    assert "vllm" in without.specs
    assert "frontend" not in without.specs
