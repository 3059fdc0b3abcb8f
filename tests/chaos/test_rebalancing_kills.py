"""Rebalances in which a server or the balancer dies at any moment. KILL_MOMENTS=200 for the long run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eaas.balancer_client import BalancerClient
from eaas.config import load_config
from eaas.errors import ClusterError
from eaas.types import Placement

ROUNDS = int(os.environ.get("KILL_MOMENTS", "3"))
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300 + 60 * ROUNDS)]
SERVERS = tuple(f"expert-server-{i}" for i in range(3))
VICTIMS = (*SERVERS, "balancer")


def any_placement(now: Placement, dice: np.random.Generator) -> Placement:
    """Each expert on two servers, with any shares."""
    layers, servers, experts = now.holds_LSE.shape
    order = np.argsort(dice.random((layers, servers, experts)), axis=1)
    holds_LSE = order < 2
    shares_LSE = np.where(holds_LSE, 0.1 + dice.random(holds_LSE.shape), 0)
    shares_LSE /= shares_LSE.sum(axis=1, keepdims=True)
    return Placement(0, now.servers, holds_LSE, shares_LSE.astype(np.float32))


def test_nobody_notices_who_dies_in_a_rebalance(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    join: Callable[..., Any],
    calling: Callable[..., Any],
    throttles: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    """No expert uncovered that has a live copy, no two placements of one epoch, no failed request."""
    config = tmp_path / "cluster.yaml"
    # A share takes about half a second.
    config.write_text("balancer: {ack_timeout_s: 6.0}\nexpert_server: {load_bytes_per_s: 800000}\n")
    cluster = faulty_cluster(
        checkpoint(), redundancy=2, config_file=config, config=load_config(config)
    )
    client = join(cluster)
    dice = np.random.default_rng(7)
    seen: dict[int, bytes] = {}
    mixed: list[int] = []
    plain = client.cluster._placements._on_placement

    def take(placement: Placement) -> None:
        said = placement.to_proto().SerializeToString(deterministic=True)
        if seen.setdefault(placement.epoch, said) != said:
            mixed.append(placement.epoch)
        plain(placement)

    client.cluster._placements._on_placement = take
    with calling(client) as calls:
        for number in range(ROUNDS):
            victim = VICTIMS[int(dice.integers(len(VICTIMS)))]
            address = str(cluster.children["balancer"].address)
            with BalancerClient(address) as balancer:
                now = client.until(balancer.placement)
                balancer.apply_placement(any_placement(now, dice))
                time.sleep(dice.uniform(0.0, 1.5))
                os.kill(cluster.children[victim].pid, signal.SIGKILL)
            if victim != "balancer":
                throttles(victim).reset()
            cluster.restart(victim)
            client.wait(3)
            with BalancerClient(str(cluster.children["balancer"].address)) as balancer:
                placement = client.until(lambda b=balancer: rests(b))
            client.until(lambda p=placement: client.cluster.placement.epoch == p.epoch)
            assert set(placement.servers) == set(SERVERS)
            assert (placement.holds_LSE.sum(axis=1) >= 2).all()
            assert not client.cluster.uncovered()
            done = len(calls.seconds)
            client.until(lambda d=done: len(calls.seconds) > d + 5)
            print(f"{number + 1}: {victim}, epoch {placement.epoch}, {len(calls.seconds)} calls")
    assert len(seen) >= ROUNDS
    assert not mixed


def rests(balancer: BalancerClient) -> Placement | None:
    """The placement, once it is all that servers hold and nothing else is on its way."""
    try:
        placement, newest = balancer.placement(), balancer.history(1)
    except ClusterError:
        return None
    if placement is None or not newest or newest[0].epoch != placement.epoch:
        return None
    return placement if newest[0].retire_s > 0 else None
