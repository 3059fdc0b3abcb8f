"""The page's sections for each state of a cluster, in text and pictures."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attention_client.serving.dashboard.charts import BALANCE, SHARE, Line, chart, heatmap
from attention_client.serving.dashboard.nodes import encode
from attention_client.serving.dashboard.sections import draw, draw_placement
from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.counters import Counters, Rates
from eaas.cluster_snapshot.events import decision_text
from eaas.cluster_snapshot.loading import Loading
from eaas.cluster_snapshot.model import Decision, Event, Load, MemberSnapshot, Point, Source
from eaas.types import Member, MemberState, Placement, Role


def server(name: str, state: MemberState = MemberState.SERVING, **fields: Any) -> MemberSnapshot:
    member = Member(
        name, Role.EXPERT_SERVER, 71, "here", "here:1", state, incarnation=3, experts=5, in_flight=2
    )
    return MemberSnapshot(replace(member, **fields), 1.25, 0.5)


def snapshot(**fields: Any) -> ClusterSnapshot:
    holds_LSE = np.array([[[1, 1, 1, 0], [0, 0, 1, 1]]] * 2, np.bool_)
    placement = Placement(4, ("a", "b"), holds_LSE, holds_LSE.astype(np.float32))
    sources = {name: Source(name) for name in ("monitor", "balancer", "endpoint")}
    base = ClusterSnapshot(at=100.0, sources=sources, members=(server("a"), server("b")))
    return replace(base, placement=placement, **fields)


def text(drawn: str) -> str:
    """All text of a section."""
    return " ".join(" ".join(_texts(json.loads(drawn))).split())


def _texts(children: list[Any]) -> Iterator[str]:
    for child in children:
        yield from (child,) if isinstance(child, str) else _texts(child[2])


def elements(drawn: str, tag: str) -> list[dict[str, str]]:
    """The attributes of a section's elements of a kind."""
    found, left = [], json.loads(drawn)
    while left:
        child = left.pop(0)
        if not isinstance(child, str):
            left = child[2] + left
            if child[0] == tag:
                found.append(child[1])
    return found


@pytest.mark.parametrize("state", list(MemberState))
def test_a_member_is_shown_in_its_state(state: MemberState) -> None:
    drawn = text(draw(snapshot(members=(server("a", state), server("b"))))["members"])
    lease = "— 50% —" if state.is_gone else "2 50% 1.2 s"
    assert f"a {state.value} 3 5 {lease} 71 here:1 b SERVING" in drawn
    serving = "2 of 2" if state is MemberState.SERVING else "1 of 2"
    summary = text(draw(snapshot(members=(server("a", state), server("b"))))["summary"])
    assert f"Expert servers {serving} serving" in summary


def test_an_empty_cluster_says_so_in_every_section() -> None:
    drawn = draw(ClusterSnapshot())
    for name, words in {
        "members": "No members are known yet",
        "load": "The load is not known yet",
        "events": "No events",
        "decisions": "decisions are not known yet",
        "summary": "Expert servers — Live replicas — Epoch — PAR — Bound — Gap — Tokens/s — TTFT —",
    }.items():
        assert words in text(drawn[name])
    assert "not known yet" in draw_placement(ClusterSnapshot(), 0)


def test_what_is_known_to_be_nothing_is_said() -> None:
    load = Load(("a",), np.zeros((1, 1)), np.ones(1), np.ones(1), 0)
    drawn = draw(replace(ClusterSnapshot(), load=load, decisions=(), rates=Rates(0.0)))
    assert "No expert has computed anything" in text(drawn["load"])
    assert "has made no decisions" in text(drawn["decisions"])
    assert "Tokens/s 0.0 TTFT —" in text(drawn["summary"])
    monitor = Member("m", Role.MONITOR, 7, "here", "here:1", MemberState.SERVING)
    shown = replace(ClusterSnapshot(), members=(MemberSnapshot(monitor, 0.1),))
    assert "Expert servers 0 of 0 serving" in text(draw(shown)["summary"])


def test_the_axis_names_servers_only_if_all_names_fit() -> None:
    def axis(*names: str) -> str:
        load = Load(names, np.ones((1, len(names))), np.ones(len(names)), np.ones(1), 1)
        return text(draw(snapshot(load=load))["load"])

    assert "0 1 2 idle" in axis(*(f"expert-server-{i}" for i in range(3)))
    # Short names of many servers, and long ones of few.
    assert "64 servers: expert-server-0 … expert-server-63 idle" in axis(
        *(f"expert-server-{i}" for i in range(64))
    )
    long = [f"gpu-node-17.rack-{i}.example.net" for i in range(2)]
    assert f"2 servers: {long[0]} … {long[1]} idle" in axis(*long)


def test_load_has_a_picture_and_a_table() -> None:
    load = Load(
        ("a", "b"), np.array([[30.0, 10], [20, 20]]), np.array([1.0, 1]), np.array([1.5, 1]), 120
    )
    drawn = draw(snapshot(load=load))["load"]
    assert "a 50 1.25 1.00 b 30 0.75 1.00" in text(drawn)
    assert "in the last 120 s with load" in text(drawn)
    (picture,) = elements(drawn, "img")
    assert "Layer 0 is the most uneven, with a PAR of 1.50" in picture["alt"]
    levels = pixels(drawn)
    assert levels[0][0] > levels[1][0] > levels[0][1]
    assert levels[1][0] == levels[1][1]


def test_load_is_relative_to_speed() -> None:
    load = Load(("a", "b"), np.array([[40.0, 20]]), np.array([2.0, 1]), np.array([1.0]), 1)
    levels = pixels(draw(snapshot(load=load))["load"])
    assert levels[0][0] == levels[0][1]


@pytest.mark.parametrize("state", [None, MemberState.DEAD, MemberState.JOINING])
def test_placement_and_tile_count_the_same_live_replicas(state: MemberState | None) -> None:
    gone = () if state is None else (server("b", state),)
    shown = snapshot(members=(server("a"), *gone))
    drawn = draw_placement(shown, 1)
    words = text(drawn)
    assert "1 with 0 live replicas, 3 with 1 live replica." in words
    assert "Live replicas 2 uncovered Epoch" in text(draw(shown)["summary"])
    assert "a SERVING 3 0-2" in words
    assert f"b {'DEAD' if state is None else state.value} 0 2-3" in words
    assert [[value > 0 for value in row] for row in pixels(drawn)] == [
        [True, True, True, False],
        [False, False, False, False],
    ]
    everybody = snapshot()
    assert "3 with 1 live replica, 1 with 2 live replicas." in text(draw_placement(everybody, 1))
    assert "Live replicas ≥ 1, on 1 node" in text(draw(everybody)["summary"])
    assert "Layer 1:" in elements(draw_placement(everybody, 99), "img")[0]["alt"], "the last one"


def test_par_bound_gap_and_rates() -> None:
    rates = Rates(12.34, 0.25, None)
    points = tuple(Point(90.0 + i, 1.2 + i / 10, 1.1, rates) for i in range(3))
    shown = snapshot(
        par=1.4, bound=1.12, rates=rates, curve=points, counters=Counters(running=3, waiting=1)
    )
    drawn = draw(shown)
    words = "PAR 1.40 Bound 1.12 Gap 1.25 Tokens/s 12.3 TTFT 250 ms ITL —"
    assert words in text(drawn["summary"])
    assert "Requests: 3 running, 1 waiting." in text(drawn["curves"])
    assert "PAR: 1.40, bound 1.12, gap 1.25" in text(drawn["curves"])
    plots = [e["aria-label"] for e in elements(drawn["curves"], "div") if "aria-label" in e]
    assert plots[0] == "PAR over the last 60 s, 1 to 1.4. Now: 1.40, bound 1.12, gap 1.25."
    assert plots[2] == "Time to first token over the last 60 s, 0 to 400 ms. Now: 250 ms."
    kinds = [line["class"] for line in elements(drawn["curves"], "polyline")]
    assert kinds == ["par", "bound", "rate", "rate"]
    assert "1.4 1.2 1 60 s ago now PAR bound Tokens/s" in text(drawn["curves"])
    assert "400 ms 200 ms 0 ms 60 s ago now mean of the last 10 s" in text(drawn["curves"])


def test_events_and_decisions_say_why() -> None:
    decision = Decision(
        9, 0, "drift", "eplb", "moves", "it pays", 1.5, 1.1, 1.05, 12, 5, "a server died"
    )
    events = (Event(97.0, "dead", "b", "is DEAD"), Event(-60.0, "joined", "a", "joined"))
    drawn = draw(snapshot(events=events, decisions=(decision,)))
    assert text(drawn["events"]) == "3 s ago b is DEAD 3 min ago a joined"
    assert [e["class"] for e in elements(drawn["events"], "li")] == ["dead", "joined"]
    row = "9 drift eplb moves 1.50 → 1.10 12 it pays Given up: a server died"
    assert row in text(drawn["decisions"])


def test_a_decision_without_a_plan_has_no_numbers() -> None:
    reason = "for the servers a, b"
    decision = Decision(1, 0, "membership", "", "moves", reason, 0, 0, 0, 0, 1, "")
    row = "1 membership — moves — — for the servers a, b"
    assert row in text(draw(snapshot(decisions=(decision,)))["decisions"])
    assert decision_text(decision) == "membership: the experts are placed for the servers a, b"


def test_tables_have_captions_and_headers_and_pictures_have_words() -> None:
    load = Load(("a", "b"), np.ones((2, 2)), np.ones(2), np.ones(2), 1)
    tables = images = 0
    for drawn in (*draw(snapshot(load=load)).values(), draw_placement(snapshot(), 0)):
        tables += len(elements(drawn, "table"))
        assert len(elements(drawn, "table")) == len(elements(drawn, "caption"))
        assert all(e.get("scope") in ("row", "col") for e in elements(drawn, "th"))
        images += len(elements(drawn, "img"))
        assert all(e["alt"] for e in elements(drawn, "img"))
        plots = [e for e in elements(drawn, "div") if e.get("role") == "img"]
        assert len(plots) == len(elements(drawn, "svg"))
        assert all(e["aria-label"] for e in plots)
    assert (tables, images) == (3, 2)


def test_heatmap_levels_stay_within_the_palette() -> None:
    values = np.array([[-1.0, 0.0, 0.5, 1.0, 9.0]])
    for palette in (BALANCE, SHARE):
        levels = pixels(encode(heatmap(values, palette, "x")))[0]
        assert levels[0] == levels[1] == 0
        assert levels[3] == levels[4] == len(palette) - 1
        assert 0 < levels[2] < levels[3]
    assert SHARE[0][3] == 0, "an absent replica is transparent"


def test_unknown_values_break_a_curve() -> None:
    values = [1.0, 2.0, None, 3.0, float("nan"), float("inf")]
    ages_s = [50.0, 40.0, 30.0, 0.0, 0.0, 0.0]
    drawn = encode(chart("x", "3", ages_s, [Line("rate", "x", values)]))
    runs = [e["points"].split() for e in elements(drawn, "polyline")]
    assert [len(run) for run in runs] == [2, 1]
    assert runs[1][0].startswith("300.0,"), "the newest is at the right"
    assert not elements(encode(chart("x", "-", [0.0], [Line("rate", "x", [None])])), "polyline")


@pytest.mark.parametrize("least", [0.0, 1.0])
@pytest.mark.parametrize("top", [0.0, 1.0, 1.01, 3.0, 7.3, 99.0, 1234.5, 2e6])
def test_a_scale_has_round_numbers_and_room_for_the_curve(least: float, top: float) -> None:
    values = [least, max(least, top)]
    drawn = encode(chart("x", "", [1.0, 0.0], [Line("rate", "x", values)], least=least))
    scale = [float(t) for t in text(drawn).split()[1:4]]
    assert scale[2] == least
    assert scale[0] >= values[1]
    assert scale[1] == pytest.approx((scale[0] + scale[2]) / 2)
    (points,) = (e["points"] for e in elements(drawn, "polyline"))
    assert all(0 <= float(p.split(",")[1]) <= 90 for p in points.split())


def pixels(drawn: str) -> list[list[int]]:
    """The palette's indices of the first image."""
    data = base64.b64decode(elements(drawn, "img")[0]["src"].removeprefix("data:image/png;base64,"))
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


def test_a_load_is_shown_below_the_members() -> None:
    loads = replace(server("a"), loading=Loading(4 * 10**9, 14 * 10**8, 28e6))
    drawn = text(draw(snapshot(members=(loads, server("b"))))["members"])
    assert drawn.endswith("here:1 a loads 1.4 of 4.0 GB (35 %), 28.0 MB/s, 93 s left")
    assert "loads" not in text(draw(snapshot())["members"])
