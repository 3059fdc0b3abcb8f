"""Rows 2 and 35 of the fault contract, on real processes. Each test quotes its row."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from chaos_world import ChaosWorld, Client, same
from eaas.errors import ExpertsUnavailableError
from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
DRAINING, LEFT = MemberState.DRAINING, MemberState.LEFT
VICTIM = "expert-server-1"


def call(client: Client, layer: int, experts: list[int]) -> torch.Tensor:
    """A layer call in which every token is routed to these experts."""
    x_TH = torch.randn(4, client.shape.hidden_size, generator=torch.Generator().manual_seed(2))
    ids_TK = torch.tensor([experts] * 4)
    return client.cluster.layer_call(layer, x_TH, ids_TK, torch.ones(4, len(experts)), None)


def test_row_2_a_server_killed_and_no_replica(chaos: ChaosWorld) -> None:
    """Row 2: the same, no replica (SIGKILL an expert server mid-batch): a typed error naming layer and
    expert; the request fails alone; other requests go on; the balancer restores coverage by itself.
    """
    cluster = chaos.start(redundancy=1)
    hasty, patient = chaos.join(cluster, layer_timeout_s=0.5), chaos.join(cluster)
    placement = hasty.cluster.view().placement
    victim = placement.servers.index(VICTIM)
    lost = np.flatnonzero(placement.holds_LSE[1, victim])[:2].tolist()
    others = np.flatnonzero(~placement.holds_LSE[1, victim])[:2].tolist()
    expected_lost_TH, expected_others_TH = call(patient, 1, lost), call(patient, 1, others)
    chaos.throttle(VICTIM).hang()
    answers: dict[str, Any] = {}

    def ask(name: str, client: Client) -> None:
        try:
            answers[name] = call(client, 1, lost)
        except ExpertsUnavailableError as error:
            answers[name] = error

    clients = {"hasty": hasty, "patient": patient}
    threads = [threading.Thread(target=ask, args=item) for item in clients.items()]
    for thread in threads:
        thread.start()
    hasty.until(lambda: chaos.throttle(VICTIM).computing)
    os.kill(cluster.children[VICTIM].pid, signal.SIGKILL)
    killed_at = time.monotonic()
    # The request with little time fails alone and names the missing experts.
    while threads[0].is_alive():
        assert same(call(patient, 1, others), expected_others_TH)
    error = answers["hasty"]
    assert isinstance(error, ExpertsUnavailableError), error
    assert (error.layer, list(error.experts)) == (1, lost)
    hasty.until(lambda: [1, lost[0]] in [list(pair) for pair in hasty.cluster.uncovered()])
    # A request with enough time gets its answer without any operator's action.
    threads[1].join()
    assert same(answers["patient"], expected_lost_TH)
    assert time.monotonic() - killed_at < 10.0
    hasty.until(lambda: not hasty.cluster.uncovered())
    assert same(call(hasty, 1, lost), expected_lost_TH)


@pytest.mark.parametrize("redundancy", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_row_35_sigterm_is_a_drain(chaos: ChaosWorld, redundancy: int) -> None:
    """Row 35: SIGTERM (drain): no new admissions; in-flight work ends; 0 failed calls."""
    cluster = chaos.start(redundancy=redundancy)
    clients = [chaos.join(cluster), chaos.join(cluster)]
    log = chaos.watch(cluster)
    leaver = cluster.children[VICTIM]
    with chaos.calling(*clients) as calls:
        calls.wait_more(20)
        os.kill(leaver.pid, signal.SIGTERM)
        assert leaver.reap(60)
        calls.wait_more(20)
    assert leaver.process.returncode == 0
    clients[0].until(lambda: log.states(VICTIM)[-2:] == [DRAINING, LEFT])
    for client in clients:
        placement = client.cluster.view().placement
        assert VICTIM not in placement.servers
        assert placement.holds_LSE.any(axis=1).all()
        # The server finished its requests, and had none when it left.
        assert not client.failovers("lost")
