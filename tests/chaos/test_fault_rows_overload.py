"""Row 24 of the fault contract: ten times the load that the servers can take."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from chaos_world import ChaosWorld, Client, same
from eaas.errors import EaasError, ExpertsUnavailableError

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(300)]

SERVERS = tuple(f"expert-server-{i}" for i in range(3))
REASONS = ("lost", "timeout", "refused", "corrupt")


class Callers:
    """Threads that call a layer in a loop for some seconds, and their results."""

    def __init__(self, clients: list[Any], threads: int, seconds: float) -> None:
        self.right = self.wrong = 0
        self.errors: list[EaasError] = []
        self.most_in_flight = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._expected_TH = clients[0].layer(4)
        workers = [
            threading.Thread(target=self._work, args=(clients[i % len(clients)],))
            for i in range(threads)
        ]
        for worker in workers:
            worker.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            slots = [
                c.in_flight for client in clients for c in client.cluster.view().connections if c
            ]
            self.most_in_flight = max(self.most_in_flight, *slots)
            time.sleep(0.01)
        self._over.set()
        for worker in workers:
            worker.join()

    def _work(self, client: Client) -> None:
        while not self._over.is_set():
            try:
                right = same(client.layer(4), self._expected_TH)
            except EaasError as error:
                with self._lock:
                    self.errors.append(error)
                continue
            with self._lock:
                self.right += right
                self.wrong += not right


def test_row_24_ten_times_overload(chaos: ChaosWorld) -> None:
    """Row 24: 10 times overload: bounded queues, push-back, goodput at least 80 % of the peak, retries at
    most 10 %.

    Four clients own all slots of each server. The peak goodput is the better of one call at a time for each
    client and of one call for each slot; the overload is ten calls at a time for each client. They take turns
    since other work comes and goes.
    """
    cluster = chaos.start()
    clients = [chaos.join(cluster, layer_timeout_s=3.0) for _ in range(4)]
    slots = clients[0].cluster.config.slots
    for server in SERVERS:
        chaos.throttle(server).slow(0.01)
    Callers(clients, len(clients) * slots, 1.0)  # Budgets are learned.
    each, full, over = [], [], []
    sent = again = 0.0
    for _ in range(3):
        each.append(Callers(clients, len(clients), 1.0))
        full.append(Callers(clients, len(clients) * slots, 1.0))
        before = sums(clients)
        over.append(Callers(clients, 10 * len(clients), 1.0))
        more = [now - was for now, was in zip(sums(clients), before, strict=True)]
        sent, again = sent + more[0], again + more[1]
    peak, goodput = max(right(each), right(full)), right(over)
    assert peak > 30
    assert not sum(turn.wrong for turn in (*each, *full, *over))
    assert goodput >= 0.8 * peak, (goodput, peak)
    # The slots are the queue: a call without a slot waits, and fails with a typed error in the end.
    assert max(turn.most_in_flight for turn in over) <= slots
    assert all(isinstance(e, ExpertsUnavailableError) for turn in over for e in turn.errors)
    assert again <= 0.1 * sent, (again, sent)
    for server in SERVERS:
        chaos.throttle(server).reset()
    after = Callers(clients, len(clients), 0.5)
    assert after.right > 5, "the cluster must recover after the overload"
    assert not after.errors


def right(turns: list[Callers]) -> int:
    return sum(turn.right for turn in turns)


def sums(clients: list[Any]) -> tuple[float, float]:
    """Requests that ended, and requests that were sent again."""
    answered = sum(
        getattr(server, kind)
        for client in clients
        for server in client.metrics.outcomes.read()
        for kind in ("answered", "timed_out", "lost", "refused", "failed", "corrupt", "hedged_away")
    )
    return answered, sum(c.failovers(*REASONS) + c.hedges() for c in clients)
