"""The JSON of a snapshot, for `eaas top --json` and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.counters import Counters, Rates
from eaas.cluster_snapshot.document import document, encode, page_document
from eaas.cluster_snapshot.events import decision_text
from eaas.cluster_snapshot.loading import Loading
from eaas.cluster_snapshot.model import Decision, Event, Load, MemberSnapshot, Point, Source
from eaas.types import Member, MemberState, Placement, Role

DECISION = Decision(
    9, 0, "drift", "eplb", "moves", "it pays", 1.5, 1.1, 1.05, 12, 5, "a server died"
)


def server(name: str, state: MemberState = MemberState.SERVING, **fields: Any) -> MemberSnapshot:
    member = Member(name, Role.EXPERT_SERVER, 71, "here", "here:1", state, incarnation=2, experts=8)
    return replace(MemberSnapshot(replace(member, in_flight=1), 1.25, 0.5), **fields)


HOLDS_LSE = np.array([[[1, 1, 1, 0], [0, 0, 1, 1]]] * 2, np.bool_)
FACTS = ClusterSnapshot(
    at=100.0,
    sources=MappingProxyType({n: Source(n) for n in ("monitor", "balancer", "endpoint")}),
    members=(server("a", loading=Loading(4 * 10**9, 14 * 10**8, 28e6)), server("b")),
    placement=Placement(5, ("a", "b"), HOLDS_LSE, HOLDS_LSE.astype(np.float32)),
    load=Load(("a", "b"), np.array([[10.0, 30], [20, 20]]), np.ones(2), np.array([1.5, 1]), 120.0),
    par=1.25,
    bound=1.0,
    counters=Counters(running=3.0, waiting=4.0, migrations={"lost": 2.0}),
    rates=Rates(123.4, 0.045, 0.0125),
    events=(Event(95.0, "suspected", "b", "is SUSPECT"),),
    decisions=(DECISION,),
)


MEMBER = """
{"id": "a", "role": "expert-server", "is_engine": false, "state": "SERVING", "incarnation": 2,
 "experts": 8, "in_flight": 1, "utilisation": 0.5, "lease_age_s": 1.25, "pid": 71,
 "address": "here:1", "unreachable": {}, "loading": {"total_bytes": 4000000000,
 "loaded_bytes": 1400000000, "bytes_per_s": 28e6, "left_s": 92.85714285714286,
 "text": "1.4 of 4.0 GB (35 %), 28.0 MB/s, 93 s left"}}
"""
PARTS = """
{"epoch": 5, "alerts": [],
 "coverage": {"uncovered": [], "min_replicas": 1, "min_nodes": 1},
 "requests": {"running": 3.0, "waiting": 4.0, "migrations": 2.0},
 "rates": {"tokens_per_s": 123.4, "ttft_s": 0.045, "itl_s": 0.0125},
 "balance": {"par": 1.25, "bound": 1.0, "gap": 1.25},
 "load": {"servers": ["a", "b"], "tokens": [[10.0, 30.0], [20.0, 20.0]], "speeds": [1.0, 1.0],
          "par": [1.5, 1.0], "window_s": 120.0},
 "events": [{"ago_s": 5.0, "kind": "suspected", "subject": "b", "text": "is SUSPECT"}]}
"""


def test_the_document() -> None:
    told = json.loads(json.dumps(document(FACTS)))
    assert told | json.loads(PARTS) == told
    assert told["members"][0] == json.loads(MEMBER)
    assert told["members"][1]["loading"] is None
    assert told["sources"]["monitor"] == {"silent_s": None, "why": ""}
    assert told["decisions"][0]["given_up"] == "a server died"
    assert told["decisions"][0]["is_counted"] is True


def test_an_empty_cluster() -> None:
    told = json.loads(json.dumps(page_document(ClusterSnapshot(), 0)))
    assert told["epoch"] == 0
    assert told["alerts"] == told["members"] == told["events"] == told["curve"] == []
    unknown = ("coverage", "load", "decisions", "placement")
    assert [told[name] for name in unknown] == [None] * 4
    assert told["balance"] == {"par": None, "bound": None, "gap": None}


def test_alerts_are_in_the_document() -> None:
    shown = replace(FACTS, members=(server("a"), server("b", MemberState.DEAD)))
    told = json.loads(json.dumps(document(shown)))
    assert told["coverage"]["uncovered"] == [[0, 3], [1, 3]]
    uncovered, dead = told["alerts"]
    assert uncovered["key"] == "2 experts uncovered"
    assert (dead["key"], dead["level"], dead["lines"][0]) == ("dead b", "bad", "b is DEAD.")


@pytest.mark.parametrize("state", [None, MemberState.DEAD, MemberState.JOINING])
def test_placement_and_coverage_count_the_same_live_replicas(state: MemberState | None) -> None:
    gone = () if state is None else (server("b", state),)
    told = page_document(replace(FACTS, members=(server("a"), *gone)), 1)
    placed = told["placement"]
    assert (placed["layers"], placed["layer"], placed["experts"]) == (2, 1, 4)
    assert placed["live_replicas"] == [[1, 0], [3, 1]]
    assert told["coverage"]["uncovered"] == [[0, 3], [1, 3]]
    assert [(s["id"], s["is_live"], s["experts"]) for s in placed["servers"]] == [
        ("a", True, [0, 1, 2]),
        ("b", False, [2, 3]),
    ]
    assert [s["shares"] for s in placed["servers"]] == [[1.0] * 3, [1.0] * 2]
    # A layer beyond the last counts as the last.
    placed = page_document(FACTS, 99)["placement"]
    assert (placed["layer"], placed["live_replicas"]) == (1, [[3, 1], [1, 2]])


def test_a_number_that_json_does_not_have_is_null() -> None:
    told = {"a": [float("nan"), float("inf"), -float("inf")], "b": "NaN, Infinity", "c": 0.5}
    assert json.loads(encode(told)) == {"a": [None] * 3, "b": "NaN, Infinity", "c": 0.5}
    assert encode({"a": 1}) == '{"a":1}'


def test_the_curve_has_columns_without_what_is_no_number() -> None:
    rates = Rates(12.34567, 0.25, None)
    points = (Point(90.0, 1.2, 1.1, rates), Point(100.0, float("inf"), None, Rates()))
    told = page_document(replace(FACTS, curve=points), 0)
    assert json.loads(encode(told))["curve"] == [
        [-10.0, 0.0],
        [1.2, None],
        [1.1, None],
        [12.3457, None],
        [0.25, None],
        [None, None],
    ]


def test_a_decision_without_a_plan_has_no_numbers() -> None:
    reason = "for the servers a, b"
    decision = Decision(1, 0, "membership", "", "moves", reason, 0, 0, 0, 0, 1, "")
    assert decision_text(decision) == "membership: the experts are placed for the servers a, b"
    (told,) = document(replace(FACTS, decisions=(decision,)))["decisions"]
    assert (told["is_counted"], told["par_now"]) == (False, 0)
