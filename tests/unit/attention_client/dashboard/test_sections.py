"""What the page says of a cluster: each state of it, in words and pictures."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attention_client.dashboard.charts import BALANCE, SHARE, curve, heatmap
from attention_client.dashboard.sections import draw, placement_of_layer
from eaas.facts import Facts
from eaas.facts.counters import Counters, Rates
from eaas.facts.events import decision_text
from eaas.facts.model import Decision, Event, Load, MemberFacts, Point, Source
from eaas.types import Member, MemberState, Placement, Role

EVIL = '<img src=x onerror="alert(1)">'


def server(name: str, state: MemberState = MemberState.SERVING, **fields: Any) -> MemberFacts:
    member = Member(
        name, Role.EXPERT_SERVER, 71, "here", "here:1", state, incarnation=3, experts=5, in_flight=2
    )
    return MemberFacts(replace(member, **fields), 1.25, 0.5)


def facts(**fields: Any) -> Facts:
    holds_LSE = np.array([[[1, 1, 1, 0], [0, 0, 1, 1]]] * 2, np.bool_)
    placement = Placement(4, ("a", "b"), holds_LSE, holds_LSE.astype(np.float32))
    sources = {name: Source(name) for name in ("monitor", "balancer", "endpoint")}
    base = Facts(at=100.0, sources=sources, members=(server("a"), server("b")), min_replicas=1)
    return replace(base, placement=placement, **fields)


def text(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


@pytest.mark.parametrize("state", list(MemberState))
def test_a_member_is_shown_in_its_state(state: MemberState) -> None:
    drawn = text(draw(facts(members=(server("a", state), server("b"))))["members"])
    lease = "— 50% —" if state is MemberState.DEAD else "2 50% 1.2 s"
    assert f"a {state.value} 3 5 {lease} 71 here:1 b SERVING" in drawn
    serving = "2 of 2" if state is MemberState.SERVING else "1 of 2"
    summary = text(draw(facts(members=(server("a", state), server("b"))))["summary"])
    assert f"Expert servers {serving} serving" in summary


def test_nothing_wrong_is_no_alert() -> None:
    assert draw(facts())["alerts"] == ""


def test_uncovered_experts_are_an_alert_and_in_the_summary() -> None:
    missing = tuple((layer, 7) for layer in range(9))
    drawn = draw(facts(uncovered=missing, min_replicas=0))
    assert "9 experts uncovered: no live replica of layer/expert 0/7, 1/7" in text(drawn["alerts"])
    assert "Experts 9 uncovered" in text(drawn["summary"])
    assert "8/7" not in drawn["alerts"]


@pytest.mark.parametrize("name", ["monitor", "balancer", "endpoint"])
def test_who_is_silent_is_an_alert_since_when_and_why(name: str) -> None:
    sources = dict(facts().sources) | {name: Source(name, 88.0, "connection refused")}
    alert = text(draw(facts(sources=sources))["alerts"])
    assert f"{name} unreachable since 12 s (connection refused)" in alert


def test_an_empty_cluster_says_so_in_every_section() -> None:
    drawn = draw(Facts())
    for name, words in {
        "members": "No members are known yet",
        "load": "No expert has computed anything",
        "events": "Nothing has happened",
        "decisions": "has decided nothing",
        "summary": "Expert servers none Experts no placement Epoch — PAR —",
    }.items():
        assert words in text(drawn[name])
    assert "no placement yet" in placement_of_layer(Facts(), 0)


def test_load_has_a_picture_and_the_same_in_a_table() -> None:
    load = Load(
        ("a", "b"), np.array([[30.0, 10], [20, 20]]), np.array([1.0, 1]), np.array([1.5, 1]), 120
    )
    drawn = draw(facts(load=load))["load"]
    assert "a 50 1.25 1.00 b 30 0.75 1.00" in text(drawn)
    assert "in the last 120 s" in text(drawn)
    assert "Most uneven is layer 0 with a PAR of 1.50" in drawn
    levels = pixels(drawn)
    assert levels[0][0] > levels[1][0] > levels[0][1]
    assert levels[1][0] == levels[1][1]


def test_a_fast_server_is_not_loaded_by_what_it_does_in_the_time_of_the_others() -> None:
    load = Load(("a", "b"), np.array([[40.0, 20]]), np.array([2.0, 1]), np.array([1.0]), 1)
    levels = pixels(draw(facts(load=load))["load"])
    assert levels[0][0] == levels[0][1]


def test_placement_of_a_layer_shows_replicas_servers_and_experts() -> None:
    drawn = placement_of_layer(facts(members=(server("a"),)), 1)
    words = text(drawn)
    assert "3 with 1 replica, 1 with 2 replicas" in words
    assert "a SERVING 3 0-2" in words
    assert "b DEAD 2 2-3" in words, "a server that nobody knows is not there"
    assert [[value > 0 for value in row] for row in pixels(drawn)] == [
        [True, True, True, False],
        [False, False, True, True],
    ]
    assert "Layer 1:" in placement_of_layer(facts(), 99), "the last one there is"


def test_par_bound_gap_and_rates() -> None:
    rates = Rates(12.34, 0.25, None)
    points = tuple(Point(90.0 + i, 1.2 + i / 10, 1.1, rates) for i in range(3))
    shown = facts(
        par=1.4, bound=1.12, rates=rates, curve=points, counters=Counters(running=3, waiting=1)
    )
    drawn = draw(shown)
    words = "PAR 1.40 Bound 1.12 Gap 1.25 Tokens/s 12.3 TTFT 250 ms ITL —"
    assert words in text(drawn["summary"])
    assert "3 requests run, 1 wait" in text(drawn["curves"])
    assert "PAR: 1.40, bound 1.12, gap 1.25" in text(drawn["curves"])
    assert "PAR over the last 2 s. Now: 1.40, bound 1.12, gap 1.25." in drawn["curves"]
    assert drawn["curves"].count('class="par"') == drawn["curves"].count('class="bound"') == 1


def test_events_and_decisions_say_why() -> None:
    decision = Decision(
        9, 0, "drift", "eplb", "moves", "it pays", 1.5, 1.1, 1.05, 12, 5, "a server died"
    )
    events = (Event(97.0, "dead", "b", "is DEAD"), Event(-60.0, "joined", "a", "joined"))
    drawn = draw(facts(events=events, decisions=(decision,)))
    assert text(drawn["events"]) == "3 s ago b is DEAD 3 min ago a joined"
    assert '<li class="dead">' in drawn["events"]
    row = "9 drift eplb moves 1.50 → 1.10 12 it pays Given up: a server died"
    assert row in text(drawn["decisions"])


def test_what_nobody_planned_has_no_figures() -> None:
    reason = "for the servers a, b"
    decision = Decision(1, 0, "membership", "", "moves", reason, 0, 0, 0, 0, 1, "")
    row = "1 membership — moves — — for the servers a, b"
    assert row in text(draw(facts(decisions=(decision,)))["decisions"])
    assert decision_text(decision) == "membership: the experts are placed for the servers a, b"


def test_names_and_reasons_of_others_are_text_and_never_markup() -> None:
    decision = Decision(1, 0, EVIL, EVIL, EVIL, EVIL, 1, 1, 1, 1, 1, EVIL)
    shown = facts(
        members=(server(EVIL, address=EVIL),),
        events=(Event(99.0, "dead", EVIL, EVIL),),
        decisions=(decision,),
        sources={"monitor": Source("monitor", 1.0, EVIL)},
        load=Load((EVIL, "b"), np.ones((2, 2)), np.ones(2), np.ones(2), 1),
    )
    shown = replace(shown, placement=replace(shown.placement, servers=(EVIL, "b")))
    drawn = [*draw(shown).values(), placement_of_layer(shown, 0)]
    assert sum("&lt;img src=x" in part for part in drawn) == 6
    assert not any("<img src=x" in part for part in drawn)


def test_tables_have_captions_and_headers_and_pictures_have_words() -> None:
    load = Load(("a", "b"), np.ones((2, 2)), np.ones(2), np.ones(2), 1)
    drawn = "".join([*draw(facts(load=load)).values(), placement_of_layer(facts(), 0)])
    assert drawn.count("<table>") == drawn.count('<caption class="unseen">') == 3
    assert drawn.count("<img ") == drawn.count(" alt=") == 2
    assert drawn.count("<svg ") == drawn.count('role="img" aria-label=') == 4
    assert drawn.count("<tr>") == drawn.count('scope="row"') + 3


def test_a_map_keeps_to_its_palette() -> None:
    values = np.array([[-1.0, 0.0, 0.5, 1.0, 9.0]])
    for palette in (BALANCE, SHARE):
        levels = pixels(heatmap(values, palette, "x"))[0]
        assert levels[0] == levels[1] == 0
        assert levels[3] == levels[4] == len(palette) - 1
        assert 0 < levels[2] < levels[3]
    assert SHARE[0][3] == 0, "what is not there is not seen"


def test_a_curve_is_broken_where_nothing_is_known() -> None:
    drawn = curve([("rate", [1.0, 2.0, None, 3.0])], "x")
    assert len(re.findall("<polyline", drawn)) == 2
    assert re.search(r'points="300.0,[\d.]+"/></svg>$', drawn), "the newest is at the right"
    assert "<polyline" not in curve([("rate", [None, None])], "x")


def pixels(html: str) -> list[list[int]]:
    """The palette's indices of the first image."""
    found = re.search(r"data:image/png;base64,([^\"]+)", html)
    assert found is not None
    data = base64.b64decode(found[1])
    columns, rows = struct.unpack(">II", data[16:24])
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(kind + body)
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    lines = zlib.decompress(packed)
    return [list(lines[r * (columns + 1) + 1 : (r + 1) * (columns + 1)]) for r in range(rows)]
