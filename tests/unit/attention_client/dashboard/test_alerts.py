"""What an operator is told first: who is silent, what is lost, what happens next, and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attention_client.dashboard.alerts import alerts
from eaas.facts import Facts
from eaas.facts.model import MemberFacts, Source
from eaas.types import Member, MemberState, Placement, Role

SERVING, DEAD = MemberState.SERVING, MemberState.DEAD


def facts(*states: MemberState, holds: Any = None, silence_s: float = 4.0, **fields: Any) -> Facts:
    """Servers s0, s1, ... in these states, in a placement of two layers."""
    servers = [f"s{i}" for i in range(len(states))]
    holds_SE = np.ones((len(states), 4)) if holds is None else np.array(holds)
    holds_LSE = np.stack([holds_SE] * 2).astype(np.bool_)
    members = tuple(
        MemberFacts(
            Member(name, Role.EXPERT_SERVER, 7, "h", "h:1", state, incarnation=1), silence_s
        )
        for name, state in zip(servers, states, strict=True)
    )
    sources = {name: Source(name) for name in ("monitor", "balancer", "endpoint")}
    placement = Placement(4, tuple(servers), holds_LSE, holds_LSE.astype(np.float32))
    base = Facts(100.0, sources, members, placement=placement, dead_grace_s=30.0)
    return replace(base, **fields)


def text(shown: Facts) -> str:
    return " ".join(" ".join(node.text for node in alerts(shown)).split())


@pytest.mark.parametrize(
    "state", [SERVING, MemberState.SUSPECT, MemberState.JOINING, MemberState.DRAINING]
)
def test_nothing_wrong_is_no_alert(state: MemberState) -> None:
    assert alerts(facts(SERVING, state)) == []
    assert alerts(Facts()) == []


@pytest.mark.parametrize("name", ["monitor", "balancer", "endpoint"])
def test_who_is_silent_is_an_alert_since_when_and_why(name: str) -> None:
    sources = dict(facts(SERVING).sources) | {name: Source(name, 88.0, "connection refused")}
    alert = text(facts(SERVING, sources=sources))
    assert f"{name} unreachable since 12 s (connection refused)" in alert


def test_uncovered_experts_are_named_up_to_some() -> None:
    shown = facts(SERVING, holds=[[1, 0, 0, 0]])
    assert "6 experts uncovered: no live replica of layer/expert 0/1, 0/2, 0/3, 1/1" in text(shown)
    assert "1/3" in text(shown)
    many = facts(SERVING, holds=[[0, 0, 0, 0]])
    assert "8 experts uncovered" in text(many)
    assert "1/2" not in text(many)


def test_a_dead_server_is_told_with_what_is_lost_and_what_comes_next() -> None:
    shown = facts(SERVING, DEAD, SERVING, holds=[[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]])
    alert = text(shown)
    assert "s1 is DEAD." in alert
    assert (
        "replicas of 6 experts, counted over all MoE layers: 4 have 1 live replica left, "
        "2 have 2 live replicas left." in alert
    )
    assert "No expert is uncovered: requests go on." in alert
    assert "unless it comes back within 30 s" in alert
    assert "eaas scale 3" in alert


def test_uncovered_experts_of_a_dead_server_are_loaded_at_once() -> None:
    alert = text(facts(SERVING, DEAD, holds=[[1, 1, 1, 0], [0, 0, 1, 1]]))
    assert "2 have no live replica, 2 have 1 live replica left" in alert
    assert "Requests that need an uncovered expert wait for it, and fail" in alert
    assert "those without a live replica now" in alert


@pytest.mark.parametrize(
    ("silence_s", "words"),
    [(1.0, "back within 30 s"), (19.0, "back within 20 s"), (25.0, "back within 10 s")],
)
def test_what_is_left_of_the_grace_is_told_in_steps(silence_s: float, words: str) -> None:
    assert words in text(facts(SERVING, DEAD, silence_s=silence_s))


def test_the_grace_is_over_or_not_known() -> None:
    assert "as far as they have memory, now." in text(facts(SERVING, DEAD, silence_s=40.0))
    assert "comes back soon" in text(facts(SERVING, DEAD, dead_grace_s=None))


def test_without_a_balancer_nothing_comes_next() -> None:
    sources = dict(facts(SERVING).sources) | {"balancer": Source("balancer", 90.0, "gone")}
    alert = text(facts(SERVING, DEAD, sources=sources))
    assert "the balancer does not answer. Start it again first" in alert


def test_a_dead_server_whose_experts_others_have_is_no_loss() -> None:
    shown = facts(SERVING, SERVING)
    dead = MemberFacts(Member("old", Role.EXPERT_SERVER, 7, "h", "h:1", DEAD), 90.0)
    alert = alerts(replace(shown, members=(*shown.members, dead)))
    assert "old is DEAD. Nothing is lost" in " ".join(alert[0].text.split())
    assert alert[0].attributes["class"] == "alert mild"


def test_many_dead_servers_are_one_alert() -> None:
    shown = facts(*[SERVING] * 2, *[DEAD] * 9)
    assert len(alerts(shown)) == 1
    assert "s2, s3, s4, s5, s6, s7, … are DEAD" in text(shown)
    assert "eaas scale 11" in text(shown)
