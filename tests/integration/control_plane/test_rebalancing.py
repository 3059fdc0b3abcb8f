"""The balancer follows the load, and operators: real gRPC, expert servers that only pretend to load."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest

from balancer.live.learned import (
    FEATURES,
    KNOBS,
    HeldOut,
    KnobFile,
    LearnedKnobs,
    write_knobs,
)
from balancer.main import Balancer
from control_plane import SERVING, SHAPE, FakeExpertServer, eventually, port_of
from eaas.balancer_client import BalancerClient
from eaas.errors import ClusterError, ConfigError
from eaas.grpc_client import channel
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import balancer_pb2_grpc, common_pb2
from eaas.session import MemberSession, Report
from eaas.types import Member, Placement, Role
from monitor.main import Monitor

pytestmark = pytest.mark.integration

L, E = SHAPE.num_layers, SHAPE.num_experts
NAMES = ("s1", "s2", "s3", "s4")
HOT = [40, 1, 1, 8, 1, 1, 1, 20]


class Box:
    """A cluster in which tokens go where the placement says."""

    def __init__(
        self, balancer: Balancer, servers: list[FakeExpertServer], monitor: str = ""
    ) -> None:
        self.monitor = monitor
        self.servers = {s.session._member.id: s for s in servers}
        self.client = BalancerClient(balancer.address)
        self.balancer = balancer
        self.hot: list[int] = HOT
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        """What each expert gets is split over its servers by their shares, as `weights` clients do."""
        while not self.over.wait(0.02):
            placement = self.client.placement()
            assert placement is not None
            for s, name in enumerate(placement.servers):
                tokens = np.rint(50 * placement.shares_LSE[:, s] * np.array(self.hot))
                self.servers[name].tokens_LE += tokens.astype(np.int64)

    def placement(self) -> Placement:
        placement = self.client.placement()
        assert placement is not None
        return placement

    def par(self) -> float:
        """Of the load as it is, under the placement as it is."""
        load_LS = (self.placement().shares_LSE * np.array(self.hot)).sum(axis=2)
        return float((load_LS.max(axis=1) / load_LS.mean(axis=1)).mean())

    def at_rest(self) -> bool:
        return bool(self.balancer.rebalancer.glimpse().at_rest)

    def held(self, layer: int, expert: int) -> set[str]:
        """Servers that have it, by the placement and in truth."""
        eventually(self.at_rest)
        placement = self.placement()
        names = {s for i, s in enumerate(NAMES) if placement.holds_LSE[layer, i, expert]}
        assert names == {s for s, fake in self.servers.items() if expert in fake.held[layer]}
        return names


@pytest.fixture
def start_box(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
    cleanup: ExitStack,
) -> Callable[..., Box]:
    def start(**fields: Any) -> Box:
        address = start_monitor().address
        settings = {"expected_servers": 4, "redundancy": 1, "num_redundant_experts": 4}
        settings |= {"step_s": 0.1, "window_size": 10, "step_interval": 10_000}
        balancer = start_balancer(address, **(settings | fields))
        box = Box(
            balancer,
            [start_server(address, s, node=f"n{i // 2}") for i, s in enumerate(NAMES)],
            address,
        )
        eventually(lambda: box.client.placement() is not None and box.at_rest())
        box.thread.start()
        cleanup.callback(box.client.close)
        cleanup.callback(box.thread.join)
        cleanup.callback(box.over.set)
        eventually(lambda: box.client.hotness().steps >= 3)
        return box

    return start


@pytest.fixture
def box(start_box: Callable[..., Box]) -> Iterator[Box]:
    return start_box()


def test_a_plan_is_a_dry_run_and_is_what_becomes_of_it(box: Box) -> None:
    before = box.placement()
    answer = box.client.plan("fractional")
    assert (answer.policy, answer.epoch, answer.applicable) == ("fractional", before.epoch, True)
    assert answer.verdict == pb.VERDICT_MOVES
    assert answer.par_now == pytest.approx(box.par(), rel=0.1)
    assert answer.par_then < 1.1
    assert answer.gap == pytest.approx(answer.par_then / answer.bound)
    assert answer.bytes == 1000 * answer.transit > 0
    assert len(answer.layers) == L
    assert {m.server_id for m in answer.moves} <= set(NAMES)
    assert 0 < answer.payback_s < 1
    assert box.placement().epoch == before.epoch, "nothing was done"

    assert box.client.apply(answer.plan_id).stages == 1
    eventually(lambda: box.placement().epoch > before.epoch and box.at_rest())
    placement = box.placement()
    assert np.allclose(
        placement.shares_LSE, Placement.from_proto(answer.placement).shares_LSE, atol=1e-6
    )
    assert box.par() < 1.1
    for s, name in enumerate(placement.servers):
        held = [sorted(experts) for experts in box.servers[name].held]
        assert held == [np.flatnonzero(h_E).tolist() for h_E in placement.holds_LSE[:, s]]
    entry = box.client.history(1)[0]
    assert (entry.trigger, entry.epoch_before, entry.epoch) == ("manual", 1, placement.epoch)
    assert entry.prepare_s > 0
    assert entry.retire_s > 0
    with pytest.raises(ClusterError, match="of epoch 2 by now, not 1"):
        box.client.apply(answer.plan_id)


def test_what_if(box: Box) -> None:
    more = box.client.plan("fractional", more_servers=2)
    assert len(more.placement.servers) == 6
    assert not more.applicable
    with pytest.raises(ClusterError, match="a cluster that is not there"):
        box.client.apply(more.plan_id)
    less = box.client.plan("fractional", without_servers=["s3"])
    assert [s.server_id for s in less.placement.servers] == ["s1", "s2", "s4"]
    even = [[10] * E] * L
    level = box.client.plan("fractional", loads_LE=even)
    assert level.verdict == pb.VERDICT_NOTHING, "the spread placement is right for that"
    assert box.client.apply(level.plan_id).stages == 0
    assert level.par_now == pytest.approx(1.0)
    slow = box.client.plan("fractional", speeds={"s1": 0.5}, redundancy=2)
    placement = Placement.from_proto(slow.placement)
    load_LS = (placement.shares_LSE * np.array(HOT)).sum(axis=2)
    assert load_LS[:, 0].mean() == pytest.approx(load_LS[:, 1].mean() / 2, rel=0.15)
    assert (placement.holds_LSE.sum(axis=1) >= 2).all()
    assert {e.trigger for e in box.client.history()} <= {"manual", "membership"}
    assert box.placement().epoch == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"policy": "magic"}, "policy 'magic' is none of"),
        ({"policy": "fractional", "knobs": {"nonsense": 1}}, "nonsense is no knob of fractional"),
        ({"without_servers": ["s9"]}, "'s9' is no server of the placement"),
        ({"without_servers": NAMES}, "no server is left"),
        ({"loads_LE": [[1, 2]]}, "loads are wanted for 3 layers of 8 experts"),
        ({"speeds": {"s1": 0.0}}, "speeds must be above 0"),
        ({"redundancy": 0}, "redundancy is 0"),
    ],
)
def test_what_cannot_be_planned(box: Box, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        box.client.plan(**arguments)


def test_without_a_load_there_is_no_plan(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
) -> None:
    address = start_monitor().address
    with BalancerClient(start_balancer(address, step_s=0.1).address) as client:
        with pytest.raises(ClusterError, match="there is no placement yet"):
            client.plan("fractional")
        for name in ("s1", "s2"):
            start_server(address, name)
        eventually(lambda: client.placement() is not None)
        with pytest.raises(ClusterError, match="no load has been seen yet"):
            client.rebalance("fractional")
        # Two servers that both have everything.
        assert client.plan("fractional", loads_LE=[HOT] * L).par_now == 1


def test_a_rebalance_does_what_pays_and_nothing_more(box: Box) -> None:
    answer = box.client.rebalance("fractional")
    assert answer.applied
    eventually(lambda: box.at_rest() and box.par() < 1.1)
    epoch = box.placement().epoch
    eventually(lambda: box.client.plan("fractional").par_now < 1.1)
    again = box.client.rebalance("fractional")
    assert not again.applied
    assert again.plan.verdict == pb.VERDICT_NOTHING
    assert box.placement().epoch == epoch
    assert "noise" in box.client.history(1)[0].reason


def test_pins_and_replicas(box: Box) -> None:
    (owner,) = box.held(1, 2)
    other = next(s for s in NAMES if s != owner)
    box.client.pin(1, 2, other)
    assert box.held(1, 2) == {owner, other}
    third = box.client.add_replica(1, 2)
    assert box.held(1, 2) == {owner, other, third}
    box.client.rebalance("fractional", force=True)
    assert box.held(1, 2) >= {other, third}, "whatever policies say"
    box.client.unpin(1, 2, other)
    with pytest.raises(ClusterError, match="is not pinned to"):
        box.client.unpin(1, 2, other)
    box.client.remove_replica(1, 2, third)
    assert third not in box.held(1, 2)
    for server in box.held(1, 2) - {other}:
        box.client.remove_replica(1, 2, server)
        box.held(1, 2)
    with pytest.raises(ClusterError, match=r"would be on 0 server\(s\), balancer.redundancy is 1"):
        box.client.remove_replica(1, 2, other)
    with pytest.raises(ClusterError, match="has no expert 2 of layer 1"):
        box.client.remove_replica(1, 2, third)
    for arguments, why in (
        ((9, 0, "s1"), "layer 9, expert 0: the model has 3 MoE layers of 8 experts"),
        ((0, 0, "nobody"), "'nobody' is no live server"),
    ):
        with pytest.raises(ClusterError, match=why):
            box.client.pin(*arguments)


def test_a_placement_of_ones_own(box: Box) -> None:
    before = box.placement()
    shares_LSE = before.shares_LSE.copy()
    wanted = Placement(0, NAMES, before.holds_LSE, shares_LSE)
    assert box.client.apply_placement(wanted).stages == 0, "it is that already"
    holds_LSE = before.holds_LSE[:, ::-1]
    wanted = Placement(0, NAMES, holds_LSE, holds_LSE.astype(np.float32))
    assert box.client.apply_placement(wanted).stages == 1
    eventually(lambda: box.placement().epoch > before.epoch and box.at_rest())
    assert (box.placement().holds_LSE == holds_LSE).all()
    for spoil, why in (
        (lambda h, s: (h & (np.arange(E) != 3), s), "expert 3 has no server"),
        (lambda h, s: (h, s / 2), "do not sum to 1"),
    ):
        holds, shares = spoil(holds_LSE, holds_LSE.astype(np.float32))
        with pytest.raises(ClusterError, match=why):
            box.client.apply_placement(Placement(0, NAMES, holds, shares * holds))
    stranger = Placement(0, ("s1", "s2", "s3", "s9"), holds_LSE, holds_LSE.astype(np.float32))
    with pytest.raises(ClusterError, match="'s9' is no server that can be given experts"):
        box.client.apply_placement(stranger)


def test_a_call_that_comes_twice_has_one_effect(box: Box) -> None:
    with channel(box.balancer.address) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        request = pb.RebalanceRequest(request_id="mine", policy="fractional", force=True)
        answers = [stub.Rebalance(request, timeout=10) for _ in range(3)]
        assert answers[0].applied
        assert answers[1:] == answers[:1] * 2
        with pytest.raises(grpc.RpcError) as caught:
            stub.SetPolicy(pb.SetPolicyRequest(request_id="mine", policy="eplb"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    eventually(box.at_rest)
    assert box.placement().epoch == 2
    assert [e.trigger for e in box.client.history()].count("manual") == 1


def test_a_policy_in_force_follows_the_load_and_its_flips(start_box: Callable[..., Box]) -> None:
    box = start_box(step_interval=10)
    time.sleep(2.0)
    assert box.placement().epoch == 1, "spread looks at no load"
    assert box.client.set_policy("fractional") == "spread"
    eventually(lambda: box.par() < 1.1)
    eventually(box.at_rest)
    assert box.client.history(1)[0].trigger in ("interval", "drift")
    box.hot = HOT[::-1]
    assert box.par() > 1.3
    flipped_at = time.monotonic()
    eventually(lambda: box.par() < 1.1)
    # Two intervals are 2 s; what is above that is this machine's.
    assert time.monotonic() - flipped_at < 6.0
    eventually(box.at_rest)
    holds_LSE, decisions = box.placement().holds_LSE, len(box.client.history())
    eventually(lambda: len(box.client.history()) >= decisions + 3)
    assert (box.placement().holds_LSE == holds_LSE).all(), "nothing moves where nothing changes"
    assert box.client.set_policy("spread") == "fractional"
    eventually(lambda: (box.placement().holds_LSE.sum(axis=1) == 1).all() and box.at_rest())


class Endpoint(BaseHTTPRequestHandler):
    """Tells that each token took 40 ms, and that there is one more at each look."""

    tokens: ClassVar = itertools.count(1)

    def do_GET(self) -> None:
        n = next(self.tokens)
        name = "eaas_inter_token_latency_seconds"
        body = f"# TYPE {name} histogram\n{name}_sum {0.04 * n}\n{name}_count {n}\n".encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_live_knobs_follow_what_is_seen_and_say_so(
    start_box: Callable[..., Box], cleanup: ExitStack
) -> None:
    box = start_box(
        policy="scalpel",
        knobs="live",
        latency_target_ms=40.0,
        link_bytes_per_s=1_000_000,
    )
    website = cleanup.enter_context(HTTPServer(("127.0.0.1", 0), Endpoint))
    thread = threading.Thread(target=website.serve_forever)
    thread.start()
    cleanup.callback(thread.join)
    cleanup.callback(website.shutdown)
    member = Member(
        "client", Role.ATTENTION_CLIENT, 1, "here", f"127.0.0.1:{website.server_port}", SERVING
    )
    session = MemberSession(box.monitor, member, report=lambda: Report(SERVING))
    cleanup.callback(session.close)
    settings = lambda: box.balancer.rebalancer.settings  # noqa: E731

    def busy_link() -> bool:
        box.servers["s2"].sent_bytes += 100_000_000
        return settings().tuned.get("budget") == 1

    # At its target the balance is tight, on links that are full few experts move.
    eventually(lambda: settings().tuned.get("drift_tol") == 0.05)
    eventually(lambda: settings().tuned["budget"] == 10)
    eventually(busy_link)
    assert settings().link_part == 0.05
    assert settings().tuned["heavy_frac"] == 0.25
    # What else a busy machine makes of the load may be said in the same breath.
    told = next(
        e for e in box.client.history() if e.trigger == "knobs" and "link 100% -> 5%" in e.reason
    )
    assert told.knobs["budget"] == 1
    assert "budget 10 -> 1" in told.reason
    assert "links are 100% full" in told.reason
    # What an operator says comes first.
    box.client.set_policy("scalpel", {"budget": 3})
    assert settings().knobs == {"budget": 3}
    eventually(lambda: settings().tuned["budget"] == 10)


def test_memory_is_kept_to_at_every_moment(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
    cleanup: ExitStack,
) -> None:
    """A replica has 1,000 bytes; each server has room for one in each layer more than it starts with."""
    address = start_monitor().address
    balancer = start_balancer(
        address, expected_servers=4, redundancy=1, num_redundant_experts=4, step_s=0.1
    )
    room = L * 3
    servers = [start_server(address, name, memory_bytes=1000 * room) for name in NAMES]
    box = Box(balancer, servers)
    cleanup.callback(box.client.close)
    eventually(lambda: box.client.placement() is not None and box.at_rest())
    # How large replicas are is known once servers were asked.
    eventually(lambda: (load := balancer.rebalancer.load) is not None and load.expert_bytes)
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


def test_memory_is_kept_to_while_servers_come_and_leave(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
    cleanup: ExitStack,
) -> None:
    """Twice each expert would take 48 on three servers that have room for 12 each."""
    address = start_monitor().address
    balancer = start_balancer(address, expected_servers=3, redundancy=2, step_s=0.1)
    room = L * E // 2
    servers = [start_server(address, name, memory_bytes=1000 * room) for name in NAMES[:3]]
    client = cleanup.enter_context(BalancerClient(balancer.address))

    def rests(wanted: int) -> bool:
        placement = client.placement()
        if placement is None or not balancer.rebalancer.glimpse().at_rest:
            return False
        held = [{(i, e) for i, layer in enumerate(s.held) for e in layer} for s in servers]
        assert all(server.most <= room for server in servers), [s.most for s in servers]
        return len(placement.servers) == wanted and len(set.union(*held)) == L * E

    eventually(lambda: rests(3))
    assert sum(server.experts for server in servers) == 3 * room, "as often as there is room for"
    servers.append(start_server(address, NAMES[3], memory_bytes=1000 * room))
    eventually(lambda: rests(4))
    assert servers[3].experts
    client.drain(NAMES[0])
    eventually(lambda: rests(3) and not servers[0].experts)
    client.drain(NAMES[1])
    eventually(lambda: rests(2) and not servers[1].experts)
    with pytest.raises(ClusterError, match=r"without s3 there is memory for 12 of 24 experts"):
        client.drain(NAMES[2])


def test_learned_knobs_are_used_live(start_box: Callable[..., Box], tmp_path: Path) -> None:
    """A network that says the same of every window, and a file that says that it won."""
    count, hidden = len(KNOBS), np.zeros((1, len(FEATURES)))
    zero_F = np.zeros(len(FEATURES))
    network = LearnedKnobs(
        zero_F, zero_F + 1, hidden, np.zeros(1), np.zeros((count, 1)), np.zeros(count)
    )
    won = HeldOut("t.npz", "0f", 4, 64, 1.5, 1.4, 1.4, 1.3, 10, 20)
    path = tmp_path / "knobs.safetensors"
    write_knobs(path, KnobFile(network, [won], {}))
    box = start_box(policy="scalpel", knobs=str(path), step_interval=10)
    eventually(lambda: any(e.trigger == "knobs" for e in box.client.history()))
    assert box.balancer.rebalancer.settings.tuned == network(zero_F)
    eventually(lambda: box.par() < 1.3)
    (told,) = (e for e in box.client.history() if e.trigger == "knobs")
    assert "learned for burstiness" in told.reason
    assert told.knobs["budget"] == 6


def test_a_node_budget_is_kept_to(
    start_box: Callable[..., Box], start_balancer: Callable[..., Balancer]
) -> None:
    """s1 and s2 on one node, the others on another one: one expert of a layer may have replicas on both."""
    box = start_box(policy="fractional", node_budget=1, step_interval=10)

    def abroad_L() -> Any:
        holds_LSE = box.placement().holds_LSE
        return (holds_LSE[:, :2].any(axis=1) & holds_LSE[:, 2:].any(axis=1)).sum(axis=1)

    eventually(lambda: box.par() < 1.3 and box.at_rest())
    assert abroad_L().max() == 1
    with pytest.raises(ClusterError, match="node_budget is set, and eplb knows no nodes"):
        box.client.set_policy("eplb")
    with pytest.raises(ClusterError, match="knows no nodes"):
        box.client.plan("eplb")
    with pytest.raises(ConfigError, match="node_budget is set, and spread knows no nodes"):
        start_balancer(box.monitor, policy="spread", node_budget=0)


def test_what_is_seen(box: Box) -> None:
    seen = box.client.hotness()
    assert [len(layer.tokens) for layer in seen.layers] == [E] * L
    assert seen.layers[0].tokens[0] > 10 * seen.layers[0].tokens[1]
    assert [s.server_id for s in seen.servers] == list(NAMES)
    assert sum(seen.servers[0].tokens) > 0
    assert seen.par[0] > 1.3


def test_what_was_wanted_and_said_survives_balancer_and_monitor(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
    tmp_path: Path,
) -> None:
    """A balancer dies without a goodbye; then the monitor is restarted, and a balancer after it."""
    settings = {"expected_servers": 4, "redundancy": 1, "num_redundant_experts": 4, "step_s": 0.1}
    monitor = start_monitor(data_dir=str(tmp_path))
    port = port_of(monitor.address)
    balancer = start_balancer(monitor.address, **settings)
    servers = [start_server(monitor.address, name) for name in NAMES]
    with channel(balancer.address) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        eventually(lambda: stub.GetPlacement(pb.GetPlacementRequest()).placement.epoch == 1)
        eventually(lambda: balancer.rebalancer.glimpse().at_rest)
        plan = stub.Plan(
            pb.PlanRequest(policy="fractional", loads=[common_pb2.LayerTokens(tokens=HOT)] * L)
        )
        stub.Apply(pb.ApplyRequest(request_id="a", plan_id=plan.plan_id), timeout=10)
        eventually(lambda: balancer.rebalancer.glimpse().at_rest)
        stub.SetPolicy(pb.SetPolicyRequest(request_id="b", policy="fractional"), timeout=10)
        pin = pb.PinExpertRequest(request_id="c", layer=0, expert=1, server_id="s4")
        stub.PinExpert(pin, timeout=10)
        eventually(lambda: balancer.rebalancer.glimpse().at_rest)
        wanted = Placement.from_proto(stub.GetPlacement(pb.GetPlacementRequest()).placement)
        decided = list(stub.History(pb.HistoryRequest()).entries)
        eventually(lambda: balancer._journal.settle(1.0))

    def goes_on(address: str, life: int) -> None:
        loads = [len(server.requests) for server in servers]
        held = [[set(h) for h in server.held] for server in servers]
        again = start_balancer(address, **settings)
        with BalancerClient(again.address) as client:
            eventually(lambda: client.placement() is not None)
            eventually(lambda: again.rebalancer.glimpse().at_rest)
            placement = client.placement()
            assert placement is not None
            assert placement.epoch > 1000 * (life - 1)
            assert (placement.holds_LSE == wanted.holds_LSE).all()
            assert np.allclose(placement.shares_LSE, wanted.shares_LSE), "shares, too"
            assert held == [[set(h) for h in server.held] for server in servers]
            assert all(len(s.requests) == n + 1 for s, n in zip(servers, loads, strict=True))
            assert client.set_policy("fractional") == "fractional", "as it was said"
            history = client.history()
            assert [e.number for e in history[-len(decided) :]] == [e.number for e in decided]
            assert history[-len(decided) - 1].trigger == "recovery"
        with channel(again.address) as line:
            stub = balancer_pb2_grpc.BalancerServiceStub(line)
            stub.PinExpert(pin, timeout=10)
            with pytest.raises(grpc.RpcError) as caught:
                stub.PinExpert(pb.PinExpertRequest(request_id="c", layer=1), timeout=10)
            assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        eventually(lambda: again._journal.settle(1.0))
        crash(again)

    def crash(dying: Balancer) -> None:
        dying._session.close()
        dying.stop()

    crash(balancer)
    goes_on(monitor.address, 2)
    monitor.stop()
    restarted = start_monitor(data_dir=str(tmp_path), port=port)
    eventually(lambda: all(s.session.view.members["s1"].state is SERVING for s in servers))
    goes_on(restarted.address, 3)
