"""Totals of request outcomes by server."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from attention_client.telemetry.request_outcomes import Outcome, OutcomeTally
from eaas.rpc.v1 import monitor_pb2 as pb


@dataclass
class Server:
    server_id: str
    incarnation: int = 1


def test_totals_by_server() -> None:
    tally = OutcomeTally()
    a, b = Server("a"), Server("b", 7)
    for outcome in Outcome:
        tally.count(a, outcome)
    tally.count(b, Outcome.ANSWERED)
    assert tally.read() == [
        pb.ServerOutcomes(
            server_id="a",
            server_incarnation=1,
            answered=1,
            timed_out=1,
            lost=1,
            refused=1,
            failed=1,
            corrupt=1,
            hedged_away=1,
            failures_since_answer=5,
        ),
        pb.ServerOutcomes(server_id="b", server_incarnation=7, answered=1),
    ]
    tally.count(a, Outcome.ANSWERED)
    assert tally.read()[0].failures_since_answer == 0


def test_a_new_incarnation_restarts_the_totals() -> None:
    tally = OutcomeTally()
    tally.count(Server("a", 1), Outcome.TIMED_OUT)
    tally.count(Server("a", 2), Outcome.ANSWERED)
    tally.count(Server("a", 1), Outcome.LOST)
    assert tally.read() == [pb.ServerOutcomes(server_id="a", server_incarnation=2, answered=1)]


def test_only_failures_wake_the_reporter() -> None:
    tally = OutcomeTally()
    woken: list[float] = []

    def wait(timeout_s: float) -> None:
        started = time.monotonic()
        tally.wait_for_failure(timeout_s)
        woken.append(time.monotonic() - started)

    tally.count(Server("a"), Outcome.TIMED_OUT)
    wait(60.0)
    for quiet in (Outcome.ANSWERED, Outcome.REFUSED):
        tally.count(Server("a"), quiet)
        wait(0.05)
        assert woken[-1] >= 0.05
    thread = threading.Thread(target=wait, args=(60.0,))
    thread.start()
    tally.count(Server("a"), Outcome.HEDGED_AWAY)
    thread.join(30)
    assert not thread.is_alive()


def test_no_count_is_lost_between_threads() -> None:
    tally, server = OutcomeTally(), Server("a")

    def work() -> None:
        for _ in range(20_000):
            tally.count(server, Outcome.ANSWERED)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.read()[0].answered == 80_000
