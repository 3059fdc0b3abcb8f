"""Rebalances during which a server, a client or the balancer is killed at a random moment.

KILL_MOMENTS is the number of kills, KILL_SEED the seed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from chaos_world import ChaosWorld, Client
from control_plane import held_by
from eaas.control_plane.balancer_client import BalancerClient
from eaas.errors import ClusterError
from eaas.types import Placement

ROUNDS = int(os.environ.get("KILL_MOMENTS", "3"))
SEED = int(os.environ.get("KILL_SEED", "7"))
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300 + 60 * ROUNDS)]
SERVERS = tuple(f"expert-server-{i}" for i in range(3))
VICTIMS = (*SERVERS, "balancer", "client", "client")


def any_placement(now: Placement, dice: np.random.Generator) -> Placement:
    """A random placement with two replicas of each expert and random shares."""
    layers, servers, experts = now.holds_LSE.shape
    order = np.argsort(dice.random((layers, servers, experts)), axis=1)
    holds_LSE = order < 2
    shares_LSE = np.where(holds_LSE, 0.1 + dice.random(holds_LSE.shape), 0)
    shares_LSE /= shares_LSE.sum(axis=1, keepdims=True)
    return Placement(0, now.servers, holds_LSE, shares_LSE.astype(np.float32))


class Truth:
    """Continuous checks of what the servers hold and which placements a client is sent.

    Attributes:
        uncovered: Experts that no server holds or that the client cannot ask; must stay empty, since two
            servers hold each expert and one dies at a time.
        mixed: Epochs with two different placements; must stay empty.
        epochs: Number of epochs that the client was sent.
        checks: Number of checks.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seen: dict[int, bytes] = {}
        self.uncovered: list[Any] = []
        self.mixed: list[int] = []
        self.checks = 0
        self._over = threading.Event()
        plain = client.cluster._placements._on_placement

        def on_placement(placement: Placement) -> None:
            said = placement.to_proto().SerializeToString(deterministic=True)
            if self._seen.setdefault(placement.epoch, said) != said:
                self.mixed.append(placement.epoch)
            plain(placement)

        client.cluster._placements._on_placement = on_placement

    @property
    def epochs(self) -> int:
        return len(self._seen)

    def held(self) -> dict[str, np.ndarray]:
        """Held experts, bool (L, E), of each server that answers."""
        found = {}
        for name, member in self._client.cluster.session.view.members.items():
            if name in SERVERS:
                with suppress(grpc.RpcError):
                    found[name] = held_by(member)
        return found

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            held = self.held()
            # On a busy machine a live server may miss the deadline.
            if len(held) >= len(SERVERS) - 1:
                bare_LE = ~np.any(list(held.values()), axis=0)
                self.uncovered += np.argwhere(bare_LE).tolist()
                self.checks += 1
            self.uncovered += self._client.cluster.uncovered()


def test_any_process_may_die_in_a_rebalance(chaos: ChaosWorld) -> None:
    """No expert uncovered that has a live copy, no two placements of one epoch, no failed request."""
    # Loading a share takes about half a second.
    cluster = chaos.start(settings={"expert_server": {"load_bytes_per_s": 800_000}})
    client = chaos.join(cluster)
    other = chaos.lone_client(cluster, "shm", "on-and-on")
    dice = np.random.default_rng(SEED)
    truth = Truth(client)
    died: Counter[str] = Counter()
    with chaos.calling(client) as calls, truth.watched():
        for number in range(ROUNDS):
            # Half of the victims are servers.
            victim = VICTIMS[int(dice.integers(len(VICTIMS)))]
            with BalancerClient(str(cluster.children["balancer"].address)) as balancer:
                client.until(lambda b=balancer: accepts_another(b, dice))
                time.sleep(dice.uniform(0.0, 0.9))
                newest = balancer.history(1)[0]
                phase = "prepare" if not newest.prepare_s else "retire"
                phase = phase if not newest.retire_s else "rest"
                assert other.running, other.last_words()
                if victim == "client":
                    other.end()
                else:
                    os.kill(cluster.children[victim].pid, signal.SIGKILL)
            died[f"{victim.rstrip('-012')}, {phase}"] += 1
            if victim == "client":
                other = chaos.lone_client(cluster, "shm", "on-and-on")
            else:
                if victim != "balancer":
                    chaos.throttle(victim).reset()
                cluster.restart(victim)
            client.wait(3)
            with BalancerClient(str(cluster.children["balancer"].address)) as balancer:
                placement = client.until(lambda b=balancer: rests(b))
            client.until(lambda p=placement: client.cluster.placement.epoch == p.epoch)
            assert set(placement.servers) == set(SERVERS)
            assert (placement.holds_LSE.sum(axis=1) >= 2).all()
            # Servers hold exactly the new placement.
            for name, held_LE in truth.held().items():
                assert (held_LE == placement.holds_LSE[:, placement.servers.index(name)]).all()
            assert not truth.uncovered
            calls.wait_more(5)
            print(f"{number + 1}: {victim}, {phase}, epoch {placement.epoch}", flush=True)
        assert other.running, other.last_words()
    print(f"{dict(died)}; {len(calls.seconds)} calls, {truth.checks} checks, {truth.epochs} epochs")
    assert truth.epochs >= ROUNDS
    assert truth.checks >= ROUNDS
    assert not truth.mixed
    assert not truth.uncovered


def accepts_another(balancer: BalancerClient, dice: np.random.Generator) -> bool:
    """Whether the balancer takes another placement: not while it rolls out one of its own."""
    try:
        now = balancer.placement()
        if now is not None:
            balancer.apply_placement(any_placement(now, dice))
    except ClusterError:
        return False
    return now is not None


def rests(balancer: BalancerClient) -> Placement | None:
    """The placement, once its roll-out is complete."""
    try:
        placement, newest = balancer.placement(), balancer.history(1)
    except ClusterError:
        return None
    if placement is None or not newest or newest[0].epoch != placement.epoch:
        return None
    return placement if newest[0].retire_s > 0 else None
