"""Facts of readings: what is shown, what stays while somebody is silent, what happened in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eaas.facts.counters import Counters, Rates, rates, read_counters
from eaas.facts.fold import FactsFold
from eaas.facts.model import Answer, Decision, Facts, Load, Reading
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


def told(facts: Facts) -> list[tuple[str, str]]:
    return [(event.kind, event.subject) for event in reversed(facts.events)]


@pytest.fixture
def fold() -> FactsFold:
    fold = FactsFold()
    fold.take(
        Reading(
            10.0, members=(server("b"), server("a")), placement=placement(), counters=Counters()
        )
    )
    return fold


def test_the_first_look_has_members_and_no_events(fold: FactsFold) -> None:
    assert [m.member.id for m in fold.facts.members] == ["a", "b"]
    assert (fold.facts.uncovered, fold.facts.min_replicas) == ((), 1)
    assert fold.facts.events == ()
    assert all(source.silent_since is None for source in fold.facts.sources.values())


def test_members_are_in_the_order_of_their_numbers_whatever_their_state(fold: FactsFold) -> None:
    names = ["s-0", "s-1", "s-2", "s-10", "s-10b", "t"]
    for dead in names:
        states = {name: DEAD if name == dead else SERVING for name in names}
        members = tuple(server(name, states[name]) for name in reversed(names))
        facts = fold.take(Reading(11.0, members=members))
        assert [m.member.id for m in facts.members] == names


@pytest.mark.parametrize("state", list(MemberState))
def test_a_replica_counts_where_its_server_can_be_asked(
    fold: FactsFold, state: MemberState
) -> None:
    facts = fold.take(Reading(11.0, members=(server("a", state), server("b"))))
    live = int(state in (SERVING, SUSPECT, MemberState.DRAINING))
    assert facts.live_replicas_LE.tolist() == [[live, live + 1]] * 2
    assert facts.min_replicas == live
    assert facts.uncovered == (() if live else ((0, 0), (1, 0)))


def test_the_grace_of_the_dead_stays_until_another_one_is_said(fold: FactsFold) -> None:
    assert fold.facts.dead_grace_s is None
    assert fold.take(Reading(11.0, dead_grace_s=30.0)).dead_grace_s == 30.0
    assert fold.take(Reading(12.0)).dead_grace_s == 30.0


def test_a_kill_is_told_as_suspected_dead_uncovered_and_failed_over(fold: FactsFold) -> None:
    fold.take(Reading(11.0, members=(server("a", SUSPECT), server("b"))))
    counters = Counters(failovers={"lost": 2.0})
    facts = fold.take(Reading(12.0, members=(server("a", DEAD), server("b")), counters=counters))
    assert told(facts) == [
        ("suspected", "a"),
        ("dead", "a"),
        ("uncovered", "experts"),
        ("failover", "endpoint"),
    ]
    assert facts.uncovered == ((0, 0), (1, 0))
    assert facts.min_replicas == 0
    assert "2 parts of layer calls sent to another replica (lost)" in facts.events[0].text
    assert [e.at for e in facts.events] == [12.0, 12.0, 12.0, 11.0]


def test_a_member_that_returns_is_another_life(fold: FactsFold) -> None:
    fold.take(Reading(11.0, members=(server("a", DEAD), server("b"))))
    back = replace(server("a"), incarnation=2, pid=8)
    facts = fold.take(Reading(12.0, members=(back, server("b"))))
    assert told(facts)[2:] == [("joined", "a"), ("serving", "a"), ("covered", "experts")]
    assert "life 2, pid 8" in next(e.text for e in facts.events if e.kind == "joined")


def test_a_member_that_is_named_no_more_has_left_but_only_once(fold: FactsFold) -> None:
    assert told(fold.take(Reading(11.0, members=(server("a"),)))) == [("dead", "b")]
    fold.take(Reading(12.0, members=(server("a"), server("b", DEAD))))
    before = fold.facts.events
    assert fold.take(Reading(13.0, members=(server("a"),))).events == before


def test_a_silent_monitor_leaves_the_last_members_and_their_leases_grow_old(
    fold: FactsFold,
) -> None:
    fold.take(Reading(11.0, members=(server("a", silence_s=0.5), server("b"))))
    silent = Answer("no answer in time")
    fold.take(Reading(12.0, monitor=silent))
    facts = fold.take(Reading(14.0, monitor=silent))
    assert [m.lease_age_s for m in facts.members] == [3.5, 3.0]
    assert facts.sources["monitor"].text(24.0) == "monitor unreachable since 12 s"
    assert told(facts) == [("unreachable", "monitor")]
    facts = fold.take(Reading(15.0, members=(server("a"), server("b"))))
    assert told(facts) == [("unreachable", "monitor"), ("reachable", "monitor")]
    assert facts.sources["monitor"].text(15.0) == "monitor answers"


def test_par_bound_and_gap_and_none_of_them_without_a_balancer(fold: FactsFold) -> None:
    facts = fold.take(Reading(11.0, load=load(1.5), bound=1.2))
    assert (facts.par, facts.bound) == (1.5, 1.2)
    assert facts.gap == pytest.approx(1.25)
    facts = fold.take(Reading(12.0, balancer=Answer("away")))
    assert facts.par is None
    assert facts.gap is None
    assert facts.load is not None
    assert [(p.par, p.bound) for p in facts.curve[-2:]] == [(1.5, 1.2), (None, None)]


def test_without_tokens_there_is_no_par(fold: FactsFold) -> None:
    idle = replace(load(1.0), tokens_LS=np.zeros((2, 2)))
    assert fold.take(Reading(11.0, load=idle)).par is None


def test_decisions_are_told_once_and_not_those_of_before(fold: FactsFold) -> None:
    one = Decision(1, 0, "interval", "eplb", "nothing", "noise", 1.3, 1.3, 1.1, 0, 0, "")
    two = replace(one, number=2, trigger="drift", verdict="moves", reason="it pays", transit=4)
    two = replace(two, par_then=1.12, given_up="a server died.")
    fold = FactsFold()
    # The balancer is found among the members: the first look of all cannot ask it.
    assert fold.take(Reading(9.0)).decisions is None
    assert fold.take(Reading(10.0, decisions=(one,))).events == ()
    fold.take(Reading(11.0, decisions=(two, one)))
    facts = fold.take(Reading(12.0, decisions=(two, one)))
    assert [(e.kind, e.text) for e in facts.events] == [
        (
            "rebalance",
            "drift: 4 replicas move, PAR 1.30 to 1.12: it pays Given up: a server died.",
        )
    ]


def test_a_balancer_that_counts_anew_is_heard() -> None:
    one = Decision(1, 0, "first", "eplb", "moves", "", 0.0, 0.0, 0.0, 0, 7, "")
    fold = FactsFold()
    fold.take(Reading(10.0, decisions=(replace(one, number=57),)))
    facts = fold.take(Reading(11.0, decisions=(one,)))
    assert [e.text for e in facts.events] == ["first: the experts are placed"]
    assert fold.take(Reading(12.0, decisions=(one,))).events == facts.events


def test_utilisation_is_of_the_time_between_heartbeats(fold: FactsFold) -> None:
    fold.take(Reading(11.0, members=(server("a", busy_s=1.0),)))
    # The same heartbeat again, a little older, then the next one.
    fold.take(Reading(11.5, members=(server("a", busy_s=1.0, silence_s=0.5),)))
    facts = fold.take(Reading(12.0, members=(server("a", busy_s=1.25),)))
    assert facts.members[0].utilisation == pytest.approx(0.25)
    facts = fold.take(Reading(13.0, members=(server("a", DEAD, busy_s=1.25),)))
    assert facts.members[0].utilisation is None


def test_rates_are_of_the_last_ten_seconds_and_survive_a_restart() -> None:
    fold = FactsFold()
    for second in range(20):
        tokens = 100.0 if second >= 5 else 0.0
        counters = Counters(tokens=tokens, ttft_s=tokens / 50, first_tokens=tokens / 100)
        facts = fold.take(Reading(float(second), counters=counters))
        expected = 100 / min(second, 10) if 5 <= second < 15 else 0.0
        assert facts.rates.tokens_per_s == pytest.approx(expected), second
    assert rates(Counters(tokens=9), Counters(tokens=1), 1.0) == Rates()
    assert fold.take(Reading(20.0, endpoint=Answer("refused"))).rates == Rates()


def test_after_a_time_without_a_look_rates_and_curves_begin_anew() -> None:
    fold = FactsFold()
    for at, tokens in ((1.0, 0.0), (2.0, 10.0), (3.0, 20.0)):
        fold.take(Reading(at, counters=Counters(tokens=tokens)))
    facts = fold.take(Reading(1000.0, counters=Counters(tokens=9000.0)))
    assert (facts.rates, len(facts.curve)) == (Rates(), 1)
    facts = fold.take(Reading(1001.0, counters=Counters(tokens=9050.0)))
    assert facts.rates.tokens_per_s == pytest.approx(50)
    assert [p.at for p in facts.curve] == [1000.0, 1001.0]


def test_counters_of_prometheus_text() -> None:
    text = """# TYPE eaas_generation_tokens_total counter
eaas_generation_tokens_total 12.0
eaas_time_to_first_token_seconds_bucket{le="0.1"} 2.0
eaas_time_to_first_token_seconds_sum 0.5
eaas_time_to_first_token_seconds_count 2.0
eaas_failovers_total{reason="lost"} 3.0
eaas_failovers_total{reason="timed out"} 1.0
"""
    found = read_counters(text)
    assert (found.tokens, found.ttft_s, found.first_tokens) == (12.0, 0.5, 2.0)
    assert dict(found.failovers) == {"lost": 3.0, "timed out": 1.0}
    assert rates(Counters(), found, 4.0) == Rates(3.0, 0.25, None)
