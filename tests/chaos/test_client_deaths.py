"""Clients that die while they hold slots, or sleep for longer than their lease."""

from __future__ import annotations

import signal
import time

import pytest

from chaos_world import ChaosWorld, Client
from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD
LONE, SERVER = "lone-client", "expert-server-0"
# The detection window, and a delay by other tests on the machine (row 1 has a strict bound).
W_S, NEWS_S = 2.0, 6.0


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_row_13_a_client_killed_while_it_holds_slots(chaos: ChaosWorld, transport: str) -> None:
    """Row 13: a client dies holding slots: flag 3 and reclaimed within W, generation + 1."""
    cluster = chaos.start(servers=1, redundancy=1, options=("--slots", "3"))
    throttle = chaos.throttle(SERVER)
    throttle.hang()
    log = chaos.watch(cluster)
    lone = chaos.lone_client(cluster, transport, "at-once")
    waiting = chaos.join(cluster, 0)
    # One request is computed, two wait in their slots, and no slot is free for another client.
    waiting.until(lambda: throttle.computing)
    lone.wait_for("asked")
    waiting.until(lambda: "no 3 free slots of 3" in waiting.cluster.missing())
    began = throttle.batches[0]
    lone.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    dead_at = waiting.until(lambda: log.first_time(LONE, 1, DEAD))
    assert dead_at - killed_at < W_S + NEWS_S
    # The server hears of it on a watch of its own, which a busy machine may let wait.
    time.sleep(2)
    # The current batch keeps its slot from being granted again; the requests behind it are never computed.
    throttle.slow(0.0)
    waiting.wait(1)
    assert throttle.batches == (began, began), "the dead client's queued requests must be dropped"
    (connection,) = waiting.cluster.view().connections
    assert connection._link.generation == 2
    waiting.layer()
    assert throttle.batches == (began + 1, began + 1)
    waiting.until(lambda: in_flight(waiting) == 0)


def in_flight(client: Client) -> int:
    """Requests in flight at the server, as it reports to the monitor."""
    return client.cluster.session.ask_members(5.0)[SERVER].in_flight


@pytest.mark.parametrize("transport", ["shm", pytest.param("grpc", marks=pytest.mark.nightly)])
def test_a_client_that_slept_for_longer_than_its_lease_goes_on(
    chaos: ChaosWorld, transport: str
) -> None:
    """Its slots belong to others by then: it writes into none of them and gets new ones."""
    cluster = chaos.start(servers=2, redundancy=2, options=("--slots", "8"))
    log = chaos.watch(cluster)
    lone = chaos.lone_client(cluster, transport, "on-and-on")
    first = chaos.join(cluster, 2, transport=transport)
    first.until(lambda: lone.answers > 20)
    with chaos.calling(first):
        lone.signal(signal.SIGSTOP)
        first.until(lambda: log.first_time(LONE, 1, DEAD))
        # The server has slots for two clients, so these are the sleeper's former slots.
        second = chaos.join(cluster, 2, transport=transport)
        with chaos.calling(second) as calls:
            calls.wait_more(20)
            lone.signal(signal.SIGCONT)
            first.until(lambda: log.first_time(LONE, 2, SERVING))
            calls.wait_more(50)
        second.cluster.close()
        answers = lone.answers
        first.until(lambda: lone.answers > answers + 20)
    assert lone.running
    assert log.states(LONE)[-1] is SERVING
