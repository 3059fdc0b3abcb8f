"""Rows 11, 12 and 22 of the fault contract during rebalances. Each test quotes its row."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest

from attention_client.connections.connection import Connection
from chaos_world import ChaosWorld, Client, same
from control_plane import held_by
from eaas.control_plane.balancer_client import BalancerClient
from eaas.errors import ClusterError
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import common_pb2, expert_pb2, expert_pb2_grpc
from eaas.types import Member, MemberState, Placement, Role
from eaas.wire.slot import Status
from eaas_cli.local.process import wait_ready

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
SERVERS = tuple(f"expert-server-{i}" for i in range(3))
ROUNDS = int(os.environ.get("KILL_MOMENTS", "2"))


@pytest.fixture
def api() -> Iterator[Callable[[str], BalancerClient]]:
    with ExitStack() as stack:
        yield lambda address: stack.enter_context(BalancerClient(address))


def turned(now: Placement) -> Placement:
    """Every expert moved to the next server, so that everything must be loaded."""
    holds_LSE = np.roll(now.holds_LSE, 1, axis=1)
    return Placement(0, now.servers, holds_LSE, holds_LSE.astype(np.float32))


def servers_of(client: Client) -> dict[str, Member]:
    return {m.id: m for m in client.cluster.session.view.live(Role.EXPERT_SERVER)}


@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_row_11_a_balancer_killed_in_a_rebalance(
    chaos: ChaosWorld, api: Callable[[str], BalancerClient]
) -> None:
    """Row 11: balancer killed mid-push: every server holds all of the old epoch or all of the new; no
    expert uncovered. The next balancer completes the wanted placement, whatever the moment of the kill.
    """
    # Loading a share of 8 experts takes about a second.
    settings = {"expert_server": {"load_bytes_per_s": 400_000}}
    cluster = chaos.start(redundancy=1, settings=settings)
    client = chaos.join(cluster)
    dice = np.random.default_rng(1)
    with chaos.calling(client):
        for _ in range(ROUNDS):
            balancer = api(cluster.children["balancer"].address)
            old = balancer.placement()
            assert old is not None
            wanted = turned(old)
            balancer.apply_placement(wanted)
            time.sleep(dice.uniform(0.0, 2.0))
            os.kill(cluster.children["balancer"].pid, signal.SIGKILL)
            # Without a balancer, servers only complete the loads that have begun.
            follows = client.cluster.placement
            for name, server in servers_of(client).items():
                held_LE = held_by(server)
                place = old.servers.index(name)
                has_old = (held_LE >= old.holds_LSE[:, place]).all()
                has_new = (held_LE >= wanted.holds_LSE[:, place]).all()
                assert has_old or has_new, name
                assert (held_LE >= follows.holds_LSE[:, place]).all(), (
                    "the servers must hold what clients follow"
                )
            assert not client.cluster.uncovered()
            cluster.restart("balancer")
            again = api(cluster.children["balancer"].address)
            client.until(lambda a=again, o=old: (p := a.placement()) and p.epoch > o.epoch)
            client.until(lambda a=again: a.history(1)[0].retire_s > 0)
            now = again.placement()
            assert now is not None
            assert (now.holds_LSE == wanted.holds_LSE).all(), (
                "the new balancer must complete the wanted placement"
            )
            client.until(lambda n=now: client.cluster.placement.epoch == n.epoch)
            for name, server in servers_of(client).items():
                assert (held_by(server) == now.holds_LSE[:, now.servers.index(name)]).all()


def test_row_12_two_balancers(chaos: ChaosWorld, api: Callable[[str], BalancerClient]) -> None:
    """Row 12: two balancers, one with a stale epoch: servers refuse the stale one
    (FAILED_PRECONDITION); one winner.
    """
    cluster = chaos.start(redundancy=1)
    client = chaos.join(cluster)
    old = cluster.children["balancer"]
    first = client.cluster.placement
    with ExitStack() as cleanup, chaos.calling(client):
        os.kill(old.pid, signal.SIGSTOP)
        cleanup.callback(old.signal, signal.SIGCONT)
        gone = client.cluster.session.wait_for(
            lambda view: view.members["balancer"].state is MemberState.DEAD, 60
        )
        assert gone
        new = chaos.child("balancer-2", *old.arguments)
        wait_ready([new], 60)
        winner = api(str(new.address))
        client.until(lambda: (p := winner.placement()) and p.epoch > 1000)
        client.until(lambda: client.cluster.placement.epoch > 1000)
        stale = api(str(old.address))
        # The stale balancer tries to move everything when it wakes, and every server refuses.
        apply = threading.Thread(target=try_to_apply, args=(stale, turned(first)))
        apply.start()
        os.kill(old.pid, signal.SIGCONT)
        assert old.reap(60), "the stale balancer must end"
        apply.join()
        follows = client.cluster.placement
        assert follows.epoch > 1000
        client.until(lambda: winner.history(1)[0].retire_s > 0)
        for name, server in servers_of(client).items():
            held_LE = held_by(server)
            assert (held_LE == follows.holds_LSE[:, follows.servers.index(name)]).all(), name
        victim = next(iter(servers_of(client).values()))
        with channel(victim.address) as line:
            stub = expert_pb2_grpc.ExpertServiceStub(line)
            layers = [common_pb2.Holding()] * client.shape.num_layers
            for call, kind in (
                (stub.PreparePlacement, expert_pb2.PreparePlacementRequest),
                (stub.RetirePlacement, expert_pb2.RetirePlacementRequest),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call(kind(epoch=first.epoch + 1, layers=layers), timeout=10)
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        # The winner still works.
        assert winner.apply_placement(turned(follows)).stages == 1
        client.until(lambda: client.cluster.placement.epoch > follows.epoch)


def try_to_apply(balancer: BalancerClient, placement: Placement) -> None:
    """Apply a placement at a balancer that may have ended."""
    with contextlib.suppress(ClusterError):
        balancer.apply_placement(placement)


def test_row_22_a_stale_placement(
    chaos: ChaosWorld, api: Callable[[str], BalancerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 22: unknown layer or expert, stale placement: FAILED_PRECONDITION with the current epoch; one
    refresh, one retry. On the data path the status is STALE_PLACEMENT.
    """
    cluster = chaos.start(redundancy=1)
    behind, other = chaos.join(cluster), chaos.join(cluster)
    balancer = api(cluster.children["balancer"].address)
    expected_TH = other.layer()
    first = behind.cluster.placement
    # One client receives no new placement.
    held: list[Placement] = []
    plain = behind.cluster._on_placement
    behind.cluster._placements._on_placement = held.append
    balancer.apply_placement(turned(first))
    # Within its grace period, servers keep what it follows.
    assert same(behind.layer(), expected_TH)
    behind.until(lambda: balancer.history(1)[0].retire_s > 0)
    assert behind.cluster.placement is first
    behind.until(lambda: held)
    answers: list[tuple[Status, int]] = []
    poll = Connection.poll

    def spy(connection: Connection, ticket: Any) -> Any:
        answer = poll(connection, ticket)
        if answer is not None:
            answers.append((Status(answer.header.status), answer.header.detail))
        return answer

    monkeypatch.setattr(Connection, "poll", spy)
    refreshed = threading.Timer(0.3, lambda: plain(held[-1]))
    refreshed.start()
    out_TH = behind.layer()
    refreshed.join()
    assert same(out_TH, expected_TH)
    epoch = held[-1].epoch
    stale = [detail for status, detail in answers if status is Status.STALE_PLACEMENT]
    assert stale
    assert set(stale) == {epoch}, "the server must name the current epoch"
    # Every part of the call was refused until the refresh, and answered at the first try after it.
    right = [i for i, (status, _) in enumerate(answers) if status is Status.OK]
    assert right == list(range(len(answers) - len(right), len(answers)))
    answers.clear()
    assert same(behind.layer(), expected_TH)
    assert {status for status, _ in answers} == {Status.OK}
    with pytest.raises(ClusterError, match="layer 99, expert 0: the model has 3 MoE layers"):
        balancer.pin(99, 0, SERVERS[0])
