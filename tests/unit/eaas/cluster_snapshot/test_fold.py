"""Snapshots of readings: values, silent sources, events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eaas.cluster_snapshot.counters import Counters, Rates, rates, read_counters
from eaas.cluster_snapshot.fold import SnapshotFold
from eaas.cluster_snapshot.loading import Loading
from eaas.cluster_snapshot.model import ClusterSnapshot, Decision, Load, Reading
from eaas.types import Member, MemberState, Placement, Role

SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD


def server(name: str, state: MemberState = SERVING, **fields: Any) -> Member:
    return Member(name, Role.EXPERT_SERVER, 7, "here", "here:1", state, incarnation=1, **fields)


def placement(epoch: int = 1) -> Placement:
    """Two layers, two experts: `a` has all of them, `b` only expert 1."""
    holds_LSE = np.array([[[1, 1], [0, 1]]] * 2, np.bool_)
    return Placement(epoch, ("a", "b"), holds_LSE, holds_LSE.astype(np.float32))


def load(par: float) -> Load:
    return Load(("a", "b"), np.ones((2, 2)), np.ones(2), np.full(2, par))


def told(snapshot: ClusterSnapshot) -> list[tuple[str, str]]:
    return [(event.kind, event.subject) for event in reversed(snapshot.events)]


@pytest.fixture
def fold() -> SnapshotFold:
    fold = SnapshotFold()
    fold.take(
        Reading(
            10.0, members=(server("b"), server("a")), placement=placement(), counters=Counters()
        )
    )
    return fold


def test_the_first_reading_has_no_events(fold: SnapshotFold) -> None:
    assert (fold.snapshot.uncovered, fold.snapshot.min_replicas) == ((), 1)
    assert (fold.snapshot.events, fold.snapshot.dead_grace_s) == ((), None)
    assert all(source.silent_since is None for source in fold.snapshot.sources.values())
    # It stays until it changes.
    for given in (30.0, None):
        assert fold.take(Reading(11.0, dead_grace_s=given)).dead_grace_s == 30.0


def test_members_are_sorted_by_number(fold: SnapshotFold) -> None:
    names = ["s-0", "s-1", "s-2", "s-10", "s-10b", "t"]
    for dead in names:
        states = {name: DEAD if name == dead else SERVING for name in names}
        members = tuple(server(name, states[name]) for name in reversed(names))
        snapshot = fold.take(Reading(11.0, members=members))
        assert [m.member.id for m in snapshot.members] == names


@pytest.mark.parametrize("state", list(MemberState))
def test_replicas_of_answering_servers_count(fold: SnapshotFold, state: MemberState) -> None:
    snapshot = fold.take(Reading(11.0, members=(server("a", state), server("b"))))
    live = int(state in (SERVING, SUSPECT, MemberState.DRAINING))
    assert snapshot.live_replicas_LE.tolist() == [[live, live + 1]] * 2
    assert snapshot.min_replicas == live
    assert snapshot.uncovered == (() if live else ((0, 0), (1, 0)))


def test_events_of_a_kill(fold: SnapshotFold) -> None:
    fold.take(Reading(11.0, members=(server("a", SUSPECT), server("b"))))
    counters = Counters(failovers={"lost": 2.0})
    snapshot = fold.take(Reading(12.0, members=(server("a", DEAD), server("b")), counters=counters))
    assert told(snapshot) == [
        ("suspected", "a"),
        ("dead", "a"),
        ("uncovered", "experts"),
        ("failover", "endpoint"),
    ]
    assert snapshot.uncovered == ((0, 0), (1, 0))
    assert snapshot.min_replicas == 0
    assert "2 parts of layer calls sent to another replica (lost)" in snapshot.events[0].text
    assert [e.at for e in snapshot.events] == [12.0, 12.0, 12.0, 11.0]


def test_requests_that_move_are_events(fold: SnapshotFold) -> None:
    fold.take(Reading(11.0, counters=Counters(migrations={"lost": 2.0})))
    moved = Counters(migrations={"lost": 3.0, "draining": 2.0})
    texts = [e.text for e in fold.take(Reading(12.0, counters=moved)).events]
    assert texts[:2] == [
        "2 requests move to another attention client (draining)",
        "1 request moves to another attention client (lost)",
    ]


def test_a_returned_member_has_joined_again(fold: SnapshotFold) -> None:
    fold.take(Reading(11.0, members=(server("a", DEAD), server("b"))))
    back = replace(server("a"), incarnation=2, pid=8)
    snapshot = fold.take(Reading(12.0, members=(back, server("b"))))
    assert told(snapshot)[2:] == [("joined", "a"), ("serving", "a"), ("covered", "experts")]
    assert "life 2, pid 8" in next(e.text for e in snapshot.events if e.kind == "joined")


def test_a_forgotten_member_has_left_once(fold: SnapshotFold) -> None:
    assert told(fold.take(Reading(11.0, members=(server("a"),)))) == [("dead", "b")]
    fold.take(Reading(12.0, members=(server("a"), server("b", DEAD))))
    before = fold.snapshot.events
    assert fold.take(Reading(13.0, members=(server("a"),))).events == before


def test_lease_ages_grow_while_the_monitor_is_silent(
    fold: SnapshotFold,
) -> None:
    fold.take(Reading(11.0, members=(server("a", silence_s=0.5), server("b"))))
    silent = "no answer in time"
    fold.take(Reading(12.0, monitor=silent))
    snapshot = fold.take(Reading(14.0, monitor=silent))
    assert [m.lease_age_s for m in snapshot.members] == [3.5, 3.0]
    assert snapshot.sources["monitor"].text(24.0) == "monitor unreachable since 12 s"
    assert told(snapshot) == [("unreachable", "monitor")]
    snapshot = fold.take(Reading(15.0, members=(server("a"), server("b"))))
    assert told(snapshot) == [("unreachable", "monitor"), ("reachable", "monitor")]
    assert snapshot.sources["monitor"].text(15.0) == "monitor answers"


def test_par_bound_and_gap_need_a_balancer(fold: SnapshotFold) -> None:
    members = (server("b"), server("a", busy_s=0.5))
    snapshot = fold.take(Reading(11.0, members=members, load=load(1.5), bound=1.2))
    assert (snapshot.par, snapshot.bound) == (1.5, 1.2)
    assert snapshot.gap == pytest.approx(1.25)
    snapshot = fold.take(Reading(12.0, balancer="away"))
    assert snapshot.par is None
    assert snapshot.gap is None
    assert snapshot.load is not None
    assert [(p.par, p.bound) for p in snapshot.curve[-2:]] == [(1.5, 1.2), (None, None)]


def test_an_idle_cluster_has_no_par(fold: SnapshotFold) -> None:
    """The balancer keeps the last load, however old it is."""
    idle = (server("b"), server("a"))
    snapshot = fold.take(Reading(11.0, members=idle, load=load(2.7), bound=1.1))
    assert (snapshot.par, snapshot.bound, snapshot.gap) == (None, None, None)
    busy = (server("b"), server("a", busy_s=0.5))
    assert fold.take(Reading(12.0, members=busy, load=load(2.7))).par == 2.7
    # For ten seconds after the last work; heartbeats that say the same end it.
    for at in range(13, 24):
        snapshot = fold.take(Reading(float(at), members=busy, load=load(2.7)))
        assert (snapshot.par, snapshot.bound) == ((2.7, 1.1) if at <= 22 else (None, None)), at
    assert [p.par for p in snapshot.curve[-2:]] == [2.7, None]
    assert snapshot.load is not None
    no_tokens = replace(load(1.0), tokens_LS=np.zeros((2, 2)))
    assert fold.take(Reading(24.0, load=no_tokens)).par is None


def test_new_decisions_are_events_once(fold: SnapshotFold) -> None:
    one = Decision(1, 0, "interval", "eplb", "nothing", "noise", 1.3, 1.3, 1.1, 0, 0, "")
    two = replace(one, number=2, trigger="drift", verdict="moves", reason="it pays", transit=4)
    two = replace(two, par_then=1.12, given_up="a server died.")
    fold = SnapshotFold()
    # The balancer is found among the members: the first look of all cannot ask it.
    assert fold.take(Reading(9.0)).decisions is None
    assert fold.take(Reading(10.0, decisions=(one,))).events == ()
    fold.take(Reading(11.0, decisions=(two, one)))
    snapshot = fold.take(Reading(12.0, decisions=(two, one)))
    assert [(e.kind, e.text) for e in snapshot.events] == [
        (
            "rebalance",
            "drift: 4 replicas move, PAR 1.30 to 1.12: it pays Given up: a server died.",
        )
    ]


def test_decisions_of_a_restarted_balancer() -> None:
    one = Decision(1, 0, "first", "eplb", "moves", "", 0.0, 0.0, 0.0, 0, 7, "")
    fold = SnapshotFold()
    fold.take(Reading(10.0, decisions=(replace(one, number=57),)))
    snapshot = fold.take(Reading(11.0, decisions=(one,)))
    assert [e.text for e in snapshot.events] == ["first: the experts are placed"]
    assert fold.take(Reading(12.0, decisions=(one,))).events == snapshot.events


def test_utilisation_between_heartbeats(fold: SnapshotFold) -> None:
    fold.take(Reading(11.0, members=(server("a", busy_s=1.0),)))
    # The same heartbeat again, a little older, then the next one.
    fold.take(Reading(11.5, members=(server("a", busy_s=1.0, silence_s=0.5),)))
    snapshot = fold.take(Reading(12.0, members=(server("a", busy_s=1.25),)))
    assert snapshot.members[0].utilisation == pytest.approx(0.25)
    snapshot = fold.take(Reading(13.0, members=(server("a", DEAD, busy_s=1.25),)))
    assert snapshot.members[0].utilisation is None


def test_rates_of_ten_seconds_survive_a_restart() -> None:
    fold = SnapshotFold()
    for second in range(20):
        tokens = 100.0 if second >= 5 else 0.0
        counters = Counters(tokens=tokens, ttft_s=tokens / 50, first_tokens=tokens / 100)
        snapshot = fold.take(Reading(float(second), counters=counters))
        expected = 100 / min(second, 10) if 5 <= second < 15 else 0.0
        if second == 0:
            assert snapshot.rates == Rates(), "one reading has no rate"
        else:
            assert snapshot.rates.tokens_per_s == pytest.approx(expected), second
    assert rates(Counters(tokens=9), Counters(tokens=1), 1.0) == Rates()
    assert fold.take(Reading(20.0, endpoint="refused")).rates == Rates()


def test_rates_and_curves_start_again_after_a_pause() -> None:
    fold = SnapshotFold()
    for at, tokens in ((1.0, 0.0), (2.0, 10.0), (3.0, 20.0)):
        fold.take(Reading(at, counters=Counters(tokens=tokens)))
    snapshot = fold.take(Reading(1000.0, counters=Counters(tokens=9000.0)))
    assert (snapshot.rates, len(snapshot.curve)) == (Rates(), 1)
    snapshot = fold.take(Reading(1001.0, counters=Counters(tokens=9050.0)))
    assert snapshot.rates.tokens_per_s == pytest.approx(50)
    assert [p.at for p in snapshot.curve] == [1000.0, 1001.0]


def test_counters_of_prometheus_text() -> None:
    text = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total 12.0
vllm:time_to_first_token_seconds_bucket{le="0.1"} 2.0
vllm:time_to_first_token_seconds_sum 0.5
vllm:time_to_first_token_seconds_count 2.0
eaas_failovers_total{reason="lost"} 3.0
eaas_failovers_total{reason="timed out"} 1.0
eaas_frontend_migrations_total{reason="lost"} 4.0
"""
    found = read_counters(text)
    assert (found.tokens, found.ttft_s, found.first_tokens) == (12.0, 0.5, 2.0)
    assert dict(found.failovers) == {"lost": 3.0, "timed out": 1.0}
    assert dict(found.migrations) == {"lost": 4.0}
    assert rates(Counters(), found, 4.0) == Rates(3.0, 0.25, None)


def test_progress_of_a_load_stays_while_the_monitor_is_silent(fold: SnapshotFold) -> None:
    loads = server("a", MemberState.JOINING, loading_bytes=100, loaded_bytes=10)
    fold.take(Reading(11.0, members=(loads, server("b"))))
    snapshot = fold.take(Reading(12.0, members=(replace(loads, loaded_bytes=30), server("b"))))
    assert [m.loading for m in snapshot.members] == [Loading(100, 30, 20.0), None]
    snapshot = fold.take(Reading(13.0, monitor="no answer in time"))
    assert [m.loading for m in snapshot.members] == [Loading(100, 30, 20.0), None]
    snapshot = fold.take(Reading(14.0, members=(server("a"), server("b"))))
    assert [m.loading for m in snapshot.members] == [None, None]
