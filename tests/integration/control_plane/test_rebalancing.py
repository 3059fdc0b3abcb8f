"""The balancer follows the load and operators' commands: real gRPC, fake expert servers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from control_plane import SERVING, Plane, eventually, port_of
from eaas.control_plane.balancer_client import BalancerClient
from eaas.errors import ClusterError
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import balancer_pb2_grpc, common_pb2
from eaas.types import Placement
from rebalancing_box import HOT, NAMES, Box, E, L

pytestmark = pytest.mark.integration


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
    with pytest.raises(ClusterError, match="a hypothetical cluster"):
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


def test_what_cannot_be_planned(box: Box) -> None:
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"policy": "magic"}, "policy 'magic' is none of"),
        ({"policy": "fractional", "knobs": {"nonsense": 1}}, "nonsense is no knob of fractional"),
        ({"without_servers": ["s9"]}, "'s9' is no server of the placement"),
        ({"without_servers": NAMES}, "no server is left"),
        ({"loads_LE": [[1, 2]]}, "loads are wanted for 3 layers of 8 experts"),
        ({"speeds": {"s1": 0.0}}, "speeds must be above 0"),
        ({"redundancy": 0}, "redundancy is 0"),
    ]
    for arguments, why in refusals:
        with pytest.raises(ClusterError, match=why):
            box.client.plan(**arguments)


def test_without_a_load_there_is_no_plan(plane: Plane) -> None:
    address = plane.monitor().address
    with BalancerClient(plane.balancer(address, step_s=0.1).address) as client:
        with pytest.raises(ClusterError, match="there is no placement yet"):
            client.plan("fractional")
        for name in ("s1", "s2"):
            plane.server(address, name)
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
    # The last looks at the placement before are over.
    eventually(lambda: box.client.plan("fractional").verdict == pb.VERDICT_NOTHING)
    again = box.client.rebalance("fractional")
    assert not again.applied
    assert again.plan.verdict == pb.VERDICT_NOTHING
    assert box.placement().epoch == epoch
    assert re.search("noise|no gain", box.client.history(1)[0].reason)


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
    with pytest.raises(ClusterError, match=r"would be on 0 servers, balancer.redundancy is 1"):
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


def test_a_policy_in_force_follows_the_load_and_its_flips(start_box: Callable[..., Box]) -> None:
    box = start_box(step_interval=10)
    load = box.balancer.rebalancer.load
    eventually(lambda: load.counted > 15)
    assert box.placement().epoch == 1, "spread looks at no load"
    assert box.client.set_policy("fractional") == "spread"
    eventually(lambda: box.par() < 1.1)
    eventually(box.at_rest)
    assert box.client.history(1)[0].trigger in ("interval", "drift")
    box.hot = HOT[::-1]
    assert box.par() > 1.3
    eventually(lambda: box.par() < 1.1)
    eventually(box.at_rest)
    holds_LSE, decisions = box.placement().holds_LSE, len(box.client.history())
    eventually(lambda: len(box.client.history()) >= decisions + 3)
    assert (box.placement().holds_LSE == holds_LSE).all(), "nothing moves where nothing changes"
    assert box.client.set_policy("spread") == "fractional"
    eventually(lambda: (box.placement().holds_LSE.sum(axis=1) == 1).all() and box.at_rest())


def test_what_was_wanted_and_said_survives_balancer_and_monitor(
    plane: Plane, tmp_path: Path
) -> None:
    """A balancer ends; then the monitor is restarted, and a balancer after it."""
    settings = {"expected_servers": 4, "redundancy": 1, "num_redundant_experts": 4, "step_s": 0.1}
    monitor = plane.monitor(data_dir=str(tmp_path))
    port = port_of(monitor.address)
    balancer = plane.balancer(monitor.address, **settings)
    servers = [plane.server(monitor.address, name) for name in NAMES]
    with channel(balancer.address) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        eventually(lambda: stub.GetPlacement(pb.GetPlacementRequest()).placement.epoch == 1)
        eventually(lambda: balancer.rebalancer.snapshot().at_rest)
        plan = stub.Plan(
            pb.PlanRequest(policy="fractional", loads=[common_pb2.LayerTokens(tokens=HOT)] * L)
        )
        stub.Apply(pb.ApplyRequest(request_id="a", plan_id=plan.plan_id), timeout=10)
        eventually(lambda: balancer.rebalancer.snapshot().at_rest)
        stub.SetPolicy(pb.SetPolicyRequest(request_id="b", policy="fractional"), timeout=10)
        pin = pb.PinExpertRequest(request_id="c", layer=0, expert=1, server_id="s4")
        stub.PinExpert(pin, timeout=10)
        eventually(lambda: balancer.rebalancer.snapshot().at_rest)
        wanted = Placement.from_proto(stub.GetPlacement(pb.GetPlacementRequest()).placement)
        decided = list(stub.History(pb.HistoryRequest()).entries)

    def goes_on(address: str, life: int) -> None:
        loads = [len(server.requests) for server in servers]
        held = [[set(h) for h in server.held] for server in servers]
        again = plane.balancer(address, **settings)
        with BalancerClient(again.address) as client:
            eventually(lambda: client.placement() is not None)
            eventually(lambda: again.rebalancer.snapshot().at_rest)
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
                stub.PinExpert(
                    pb.PinExpertRequest(request_id="c", layer=1, server_id="s1"), timeout=10
                )
            assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        again.stop()

    balancer.stop()
    goes_on(monitor.address, 2)
    monitor.stop()
    restarted = plane.monitor(data_dir=str(tmp_path), port=port)
    eventually(lambda: all(s.session.view.members["s1"].state is SERVING for s in servers))
    goes_on(restarted.address, 3)
