"""Alerts: unreachable sources, uncovered experts, dead servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.alerts import alerts
from eaas.cluster_snapshot.model import MemberSnapshot, Source
from eaas.types import Member, MemberState, Placement, Role

SERVING, DEAD = MemberState.SERVING, MemberState.DEAD


def snapshot(
    *states: MemberState, holds: Any = None, silence_s: float = 4.0, **fields: Any
) -> ClusterSnapshot:
    """Servers s0, s1, ... in these states, in a placement of two layers."""
    servers = [f"s{i}" for i in range(len(states))]
    holds_SE = np.ones((len(states), 4)) if holds is None else np.array(holds)
    holds_LSE = np.stack([holds_SE] * 2).astype(np.bool_)
    members = tuple(
        MemberSnapshot(
            Member(name, Role.EXPERT_SERVER, 7, "h", "h:1", state, incarnation=1), silence_s
        )
        for name, state in zip(servers, states, strict=True)
    )
    sources = {name: Source(name) for name in ("monitor", "balancer", "endpoint")}
    placement = Placement(4, tuple(servers), holds_LSE, holds_LSE.astype(np.float32))
    base = ClusterSnapshot(100.0, sources, members, placement=placement, dead_grace_s=30.0)
    return replace(base, **fields)


def text(shown: ClusterSnapshot) -> str:
    return " ".join(line for alert in alerts(shown) for line in alert.lines)


@pytest.mark.parametrize(
    "state", [SERVING, MemberState.SUSPECT, MemberState.JOINING, MemberState.DRAINING]
)
def test_no_alert_without_a_problem(state: MemberState) -> None:
    assert alerts(snapshot(SERVING, state)) == []
    assert alerts(ClusterSnapshot()) == []


@pytest.mark.parametrize("name", ["monitor", "balancer", "endpoint"])
def test_an_unreachable_source(name: str) -> None:
    sources = dict(snapshot(SERVING).sources) | {name: Source(name, 88.0, "connection refused")}
    alert = text(snapshot(SERVING, sources=sources))
    assert f"{name} unreachable since 12 s (connection refused)" in alert


def test_the_first_uncovered_experts_are_named() -> None:
    shown = snapshot(SERVING, holds=[[1, 0, 0, 0]])
    assert "6 experts uncovered: no live replica of layer/expert 0/1, 0/2, 0/3, 1/1" in text(shown)
    assert "1/3" in text(shown)
    many = snapshot(SERVING, holds=[[0, 0, 0, 0]])
    assert "8 experts uncovered" in text(many)
    # A viewer who dismissed the first alert sees the second one.
    keys = [alerts(found)[0].key for found in (shown, many)]
    assert keys[0] != keys[1]
    assert "1/2" not in text(many)


GONE = {"balancer": Source("balancer", 90.0, "gone")}


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ({}, ("s1 is DEAD.", "of 6 experts", "4 have 1 live replica left", "2 have 2 live")),
        ({}, ("No expert is uncovered", "unless it returns within 30 s", "eaas scale 3")),
        (
            {"holds": [[1, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]]},
            ("2 have no live replica", "wait, and fail", "without a live replica come first"),
        ),
        ({"silence_s": 19.0}, ("unless it returns within 20 s",)),
        ({"silence_s": 25.0}, ("unless it returns within 10 s",)),
        ({"silence_s": 40.0}, ("within their memory, now.",)),
        ({"dead_grace_s": None}, ("unless it returns soon",)),
        ({"sources": dict(snapshot(SERVING).sources) | GONE}, ("balancer does not answer",)),
        ({"placement": None}, ("s1 is DEAD. Which experts are lost is not known yet",)),
    ],
)
def test_a_dead_server_with_its_loss_and_the_next_step(
    shown: dict[str, Any], words: tuple[str, ...]
) -> None:
    holds = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    alert = text(snapshot(SERVING, DEAD, SERVING, **{"holds": holds, "silence_s": 1.0} | shown))
    assert [each for each in words if each not in alert] == [], alert
    # Many are one alert.
    many = snapshot(*[SERVING] * 2, *[DEAD] * 9)
    assert len(alerts(many)) == 1
    assert "s2, s3, s4, s5, s6, s7, … are DEAD" in text(many)
    assert "eaas scale 11" in text(many)


def test_a_dead_server_without_experts_is_a_mild_alert() -> None:
    shown = snapshot(SERVING, SERVING)
    dead = MemberSnapshot(Member("old", Role.EXPERT_SERVER, 7, "h", "h:1", DEAD), 90.0)
    alert = alerts(replace(shown, members=(*shown.members, dead)))
    assert alert[0].lines[0] == "old is DEAD."
    assert alert[0].lines[1].startswith("Nothing is lost")
    assert alert[0].level == "mild"


@pytest.mark.parametrize(
    ("other", "level", "effect"),
    [
        (SERVING, "mild", "Requests continue on another attention client."),
        (DEAD, "bad", "No attention client serves"),
    ],
)
def test_a_dead_engine_and_what_it_costs(other: MemberState, level: str, effect: str) -> None:
    engines = tuple(
        MemberSnapshot(replace(member, role=Role.ATTENTION_CLIENT, engine_address="h:2"), 4.0)
        for member in (m.member for m in snapshot(DEAD, other).members)
    )
    (alert,) = alerts(snapshot(SERVING, members=(*engines, *snapshot(SERVING).members)))
    assert alert.level == level
    assert alert.lines[0].startswith("s0")
    assert alert.lines[1].startswith(effect)


def test_each_alert_has_a_key_that_stays_while_its_numbers_change() -> None:
    def keys(shown: ClusterSnapshot) -> list[str]:
        return [alert.key for alert in alerts(shown)]

    sources = dict(snapshot(SERVING).sources) | {"monitor": Source("monitor", 88.0, "refused")}
    shown = snapshot(SERVING, DEAD, holds=[[1, 0, 0, 0], [1, 1, 1, 1]], sources=sources)
    assert len(set(keys(shown))) == 3
    assert keys(replace(shown, at=105.0)) == keys(shown)
    assert text(replace(shown, at=105.0)) != text(shown)
    # Another server's death is another alert.
    assert keys(snapshot(DEAD, DEAD, SERVING)) != keys(snapshot(DEAD, SERVING, SERVING))
