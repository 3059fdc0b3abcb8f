"""Rows 1, 3, 4, 7, 14 and 23 of the fault contract, on real processes. Each test quotes its row."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from attention_client.layer_call import call as layer_call
from chaos_world import ChaosWorld, Client, same
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD
SERVERS = tuple(f"expert-server-{i}" for i in range(3))
LEASE_S = 2.0
# The monitor's check every eighth of a lease, and the delay of the news on a busy machine.
NEWS_S = LEASE_S / 8 + 1.0
ROUNDS = int(os.environ.get("KILL_MOMENTS", "2"))


@pytest.fixture
def combined(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """For each call, how often each (token, expert) pair went into the sum."""
    counts: list[np.ndarray] = []
    plain = layer_call.combine

    def combine(shape: Any, results: Any) -> torch.Tensor:
        results = list(results)
        top_k = results[0][0].pairs_RK.shape[1]
        count_TK = np.zeros((shape[0], top_k), dtype=int)
        for part, _ in results:
            count_TK[part.rows_R] += part.pairs_RK
        counts.append(count_TK)
        return plain(shape, results)

    monkeypatch.setattr(layer_call, "combine", combine)
    return counts


def once(combined: list[np.ndarray]) -> bool:
    """Whether every pair of every call was combined exactly once; resets the record."""
    right = bool(combined) and all((count_TK == 1).all() for count_TK in combined)
    combined.clear()
    return right


@pytest.mark.timeout(240 + 30 * ROUNDS)
def test_row_1_a_server_killed_in_the_middle_of_a_batch(
    chaos: ChaosWorld, combined: list[np.ndarray]
) -> None:
    """Row 1: SIGKILL an expert server mid-batch, replicas exist: the same layer call is answered by a
    replica within its deadline; DEAD within W; each token combined once.
    """
    cluster = chaos.start()
    client = chaos.join(cluster)
    log = chaos.watch(cluster)
    expected_TH = client.layer(16)
    for server in SERVERS:
        chaos.throttle(server).slow(0.02)
    for _ in range(3):
        assert same(client.layer(16), expected_TH)
    incarnations = dict.fromkeys(SERVERS, 1)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(ROUNDS):
            client.until(lambda: not computing(chaos))
            combined.clear()
            began = time.monotonic()
            call = pool.submit(client.layer, 16)
            victim = client.until(lambda: computing(chaos))[0]
            os.kill(cluster.children[victim].pid, signal.SIGKILL)
            killed_at = time.monotonic()
            assert same(call.result(timeout=60), expected_TH)
            # Far below the call's deadline of 10 s.
            assert time.monotonic() - began < 2.0
            assert once(combined)
            killed = (victim, incarnations[victim])
            dead_at = client.until(lambda k=killed: log.first_time(*k, DEAD))
            assert dead_at - killed_at < LEASE_S + NEWS_S
            chaos.throttle(victim).reset()
            chaos.throttle(victim).slow(0.02)
            cluster.restart(victim)
            incarnations[victim] += 1
            client.wait(3)
            assert same(client.layer(16), expected_TH)


def test_row_1_in_the_middle_of_a_large_call(chaos: ChaosWorld, combined: list[np.ndarray]) -> None:
    """Row 1: SIGKILL an expert server mid-batch, replicas exist: the same layer call is answered by a
    replica within its deadline; each token combined once.
    """
    cluster = chaos.start()
    client = chaos.join(cluster, max_batch_tokens=4096)
    expected_TH = client.layer(4096)
    before = client.requests()
    assert same(client.layer(4096), expected_TH)
    assert client.requests() - before <= len(SERVERS)
    for server in SERVERS:
        chaos.throttle(server).slow(0.05)
    combined.clear()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.layer, 4096)
        victim = client.until(lambda: computing(chaos))[0]
        os.kill(cluster.children[victim].pid, signal.SIGKILL)
        assert same(call.result(timeout=60), expected_TH)
    assert once(combined)
    held = [c for c in client.cluster.view().connections if c is not None]
    client.until(lambda: all(c.in_flight == 0 for c in held))


def computing(chaos: ChaosWorld) -> list[str]:
    """The servers in the middle of a batch."""
    return [server for server in SERVERS if chaos.throttle(server).computing]


def test_row_3_a_server_that_stops_and_wakes(chaos: ChaosWorld) -> None:
    """Row 3: SIGSTOP a server 5 s, then SIGCONT (gray failure): the hedge or failover wins within the
    layer's budget; SUSPECT then DEAD; on waking it finds its lease gone, drops its queue and
    re-registers as a new incarnation.
    """
    cluster = chaos.start()
    client = chaos.join(cluster)
    log = chaos.watch(cluster)
    victim = SERVERS[0]
    process = cluster.children[victim].process
    for server in SERVERS:
        chaos.throttle(server).slow(0.001)
    with chaos.calling(client) as calls:
        client.until(lambda: len(calls.seconds) > 50)
        before = len(calls.seconds)
        process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        assert len(calls.seconds) > before + 50, "calls must go on while the server is stopped"
        assert log.states(victim) == [SUSPECT, DEAD]
        process.send_signal(signal.SIGCONT)
        client.until(lambda: log.first_time(victim, 2, SERVING))
        client.wait(3)
        batches = chaos.throttle(victim).batches[1]
        client.until(lambda: chaos.throttle(victim).batches[1] > batches + 5)
    # One attempt plus the replica's answer: neither the 5 s of the stop nor the 10 s of the layer.
    assert max(calls.seconds) < 2.0
    assert log.states(victim)[:2] == [SUSPECT, DEAD]
    assert log.states(victim)[-1] is SERVING


def test_row_3_a_server_that_wakes_drops_its_queue(chaos: ChaosWorld) -> None:
    """Row 3: SIGSTOP a server, then SIGCONT: on waking it finds its lease gone, drops its queue and
    re-registers as a new incarnation. Requests that were queued behind the current batch are never computed.
    """
    cluster = chaos.start(servers=2, redundancy=2)
    client = chaos.join(cluster, 2, hedge_share=0.0, dispatch="weights")
    log = chaos.watch(cluster)
    expected = [client.layer(layer=layer) for layer in range(3)]
    victim = SERVERS[0]
    process, throttle = cluster.children[victim].process, chaos.throttle(victim)
    throttle.hang()
    began = throttle.batches[0]
    connection = client.connection(victim)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(client.layer, layer=layer) for layer in range(3)]
        client.until(lambda: throttle.computing)
        for call, expected_TH in zip(calls, expected, strict=True):
            assert same(call.result(timeout=60), expected_TH)
    assert connection.in_flight == 3, "one is computed, two are queued"
    process.send_signal(signal.SIGSTOP)
    client.until(lambda: log.first_time(victim, 1, DEAD))
    process.send_signal(signal.SIGCONT)
    client.until(lambda: log.first_time(victim, 2, SERVING))
    client.wait(2)
    throttle.slow(0.0)
    client.until(lambda: not throttle.computing)
    time.sleep(0.5)
    assert throttle.batches == (began + 1, began + 1)
    for layer in range(3):
        assert same(client.layer(layer=layer), expected[layer])
    client.until(lambda: client.layer() is not None and throttle.batches[0] > began + 1)


@pytest.mark.alone
def test_row_4_a_server_ten_times_slower(chaos: ChaosWorld) -> None:
    """Row 4: a server 10 times slower: p99 of a layer call at most 2 times the base; hedges at most 5 %
    of requests; it is weighted down or ejected under a cap on ejections.
    """
    cluster = chaos.start()
    client = chaos.join(cluster)
    # Per expert. A call takes about three times as long, well above the scheduler's noise.
    base_s = 0.003
    for server in SERVERS:
        chaos.throttle(server).slow(base_s)
    timed(client, 200)
    before = asked_so_far(chaos)
    base = timed(client, 500)
    usual = asked_so_far(chaos) - before
    before = asked_so_far(chaos)
    chaos.throttle(SERVERS[0]).slow(10 * base_s)
    slow = timed(client, 1000)
    asked = asked_so_far(chaos) - before
    seen = (
        f"ms: base p50 {q(base, 50):.1f}, p99 {q(base, 99):.1f}; one slow p50 {q(slow, 50):.1f}, "
        f"p99 {q(slow, 99):.1f}; requests {usual}, {asked}; hedges {client.hedges():.0f}"
    )
    assert q(slow, 99) <= 2 * q(base, 99), seen
    assert client.hedges() <= 0.05 * client.requests(), seen
    # The slow server gets less than half of its former share; no other server is ejected.
    assert asked[0] / len(slow) < 0.5 * usual[0] / len(base), seen
    ejections = client.cluster._calls.shared.ejections
    assert not any(ejections.out(server, time.monotonic()) for server in SERVERS[1:]), seen


def asked_so_far(chaos: ChaosWorld) -> np.ndarray:
    """Batches that each server began."""
    return np.array([chaos.throttle(server).batches[0] for server in SERVERS])


def q(seconds: list[float], percent: float) -> float:
    """A percentile, in milliseconds."""
    return float(np.percentile(seconds, percent)) * 1e3


def timed(client: Client, calls: int) -> list[float]:
    """Make sequential calls; their durations in seconds."""
    seconds = []
    for seed in range(calls):
        began = time.monotonic()
        client.layer(8, seed=seed % 50)
        seconds.append(time.monotonic() - began)
    return seconds


def test_row_7_replies_that_get_lost(chaos: ChaosWorld, combined: list[np.ndarray]) -> None:
    """Row 7: replies lost one way: retried elsewhere; nothing counted twice."""
    cluster = chaos.start()
    with chaos.through_proxies() as proxies:
        # By weights, the client asks the victim however fast it is.
        client = chaos.join(cluster, transport="grpc", dispatch="weights")
    expected = [client.layer(seed=seed) for seed in range(20)]
    assert once(combined)
    victim = SERVERS[0]
    proxy = proxies[cluster.children[victim].address]
    proxy.cut(down=True)
    computed = chaos.throttle(victim).batches[1]
    for seed, expected_TH in enumerate(expected):
        assert same(client.layer(seed=seed), expected_TH)
    assert once(combined)

    def met() -> bool:
        # A busy machine may have kept the calls above from the victim.
        assert same(client.layer(seed=0), expected[0])
        return chaos.throttle(victim).batches[1] > computed

    client.until(met)
    client.until(lambda: proxy.lost["down"])
    assert client.count("eaas_hedges_total", outcome="won") + client.failovers("timeout") > 0


def test_row_14_a_server_restarts_on_the_same_address(
    chaos: ChaosWorld, combined: list[np.ndarray], free_port: int
) -> None:
    """Row 14: a server restarts on the same address: new incarnation; clients re-attach; old replies
    dropped.
    """
    victim = SERVERS[0]
    cluster = chaos.start(ports={victim: free_port})
    log = chaos.watch(cluster)
    address = cluster.children[victim].address
    for incarnation, transport in enumerate(("shm", "grpc"), start=1):
        client = chaos.join(cluster, transport=transport, dispatch="weights")
        expected_TH = client.layer(16)
        old = client.connection(victim)
        chaos.throttle(victim).hang()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.layer, 16)
            client.until(lambda: chaos.throttle(victim).computing)
            os.kill(cluster.children[victim].pid, signal.SIGKILL)
            assert same(call.result(timeout=60), expected_TH)
        chaos.throttle(victim).reset()
        cluster.restart(victim)
        assert cluster.children[victim].address == address
        client.until(lambda i=incarnation: log.first_time(victim, i + 1, SERVING))
        client.wait(3)
        new = client.connection(victim)
        assert (old.incarnation, new.incarnation) == (incarnation, incarnation + 1)
        assert old.lost_reason is not None
        # A late answer of the former incarnation reaches nobody: the client's slots are in another arena.
        assert new._link.arena is not old._link.arena
        with channel(address) as opened:
            stub = expert_pb2_grpc.ExpertServiceStub(opened)
            late = stub.Exchange(iter([pb.ExchangeRequest(connection_id=old._link._connection_id)]))
            with pytest.raises(grpc.RpcError):
                list(late)
        combined.clear()
        before = chaos.throttle(victim).batches[1]

        def is_asked(
            client: Client = client, right_TH: Any = expected_TH, than: int = before
        ) -> bool:
            return same(client.layer(16), right_TH) and chaos.throttle(victim).batches[1] > than

        client.until(is_asked)
        assert once(combined)
        client.cluster.close()


def test_row_23_a_batch_larger_than_a_slot_is_split(
    chaos: ChaosWorld, combined: list[np.ndarray]
) -> None:
    """Row 23: a batch larger than a slot: the client splits it."""
    cluster = chaos.start(servers=2, redundancy=2, options=("--slot-tokens", "4"))
    tokens = 50
    for transport in ("shm", "grpc"):
        client = chaos.join(cluster, 2, transport=transport)
        x_TH, ids_TK, scores_TK = client.draw(tokens, seed=3)
        call = client.cluster.layer_call
        # Pieces that fit a slot, one after another.
        expected = [
            call(1, x_TH[t : t + 4], ids_TK[t : t + 4], scores_TK[t : t + 4], None)
            for t in range(0, tokens, 4)
        ]
        before = client.requests()
        combined.clear()
        assert same(call(1, x_TH, ids_TK, scores_TK, None), torch.cat(expected))
        assert once(combined)
        assert client.requests() - before >= tokens / 4
