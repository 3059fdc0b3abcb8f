"""What an operator has to know first. Pure: facts in, what is drawn out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attention_client.dashboard.nodes import Child, Node, h
from eaas.facts import Facts
from eaas.types import MemberState, Role

__all__ = ["CANNOT_BE_DRAWN", "alerts"]

_NAMED = 6
# A figure that changes each second would be read out each second.
_ROUNDED_S = 10

CANNOT_BE_DRAWN = h(
    "p",
    "The cluster cannot be shown: what is below is old. The endpoint's log says why.",
    class_="alert",
)
"""In place of the alerts, where a look failed."""


def alerts(facts: Facts) -> list[Node]:
    """Who does not answer, which experts nobody has, which servers are dead; none where all is well."""
    lines = []
    for source in facts.sources.values():
        if source.silent_since is not None:
            left = "" if source.name == "endpoint" else "; below is what it said last"
            lines.append(f"{source.text(facts.at)} ({source.why}){left}")
    if facts.uncovered:
        pairs = [f"{layer}/{expert}" for layer, expert in facts.uncovered]
        count = _count(len(pairs), "expert")
        lines.append(f"{count} uncovered: no live replica of layer/expert {_some(pairs)}")
    return [h("p", line, class_="alert") for line in lines] + _dead_servers(facts)


def _dead_servers(facts: Facts) -> list[Node]:
    dead = [
        m
        for m in facts.members
        if m.member.role is Role.EXPERT_SERVER and m.member.state is MemberState.DEAD
    ]
    if not dead:
        return []
    names = [m.member.id for m in dead]
    placed = facts.placement.servers if facts.placement is not None else ()
    missed = [m for m in dead if m.member.id in placed]
    details: list[list[Child]]
    if missed:
        # The longest dead is replaced first.
        waited_s = max(m.lease_age_s for m in missed)
        details = [[_lost(facts)], [_next(facts, waited_s)], _again(facts, len(missed))]
    else:
        details = [["Nothing is lost: other servers hold all experts."]]
    return [
        h(
            "div",
            h("p", h("strong", f"{_some(names)} {'is' if len(names) == 1 else 'are'} DEAD.")),
            *(h("p", *detail) for detail in details),
            class_="alert" if missed else "alert mild",
        )
    ]


def _lost(facts: Facts) -> str:
    """Of the experts that servers held which are not there, how many replicas are left."""
    assert facts.placement is not None
    lost_LE = facts.placement.holds_LSE[:, ~facts.live_S].any(axis=1)
    left, counts = np.unique(facts.live_replicas_LE[lost_LE], return_counts=True)
    parts = []
    for replicas, experts in zip(left.tolist(), counts.tolist(), strict=True):
        have = "has" if experts == 1 else "have"
        kept = "no live replica" if replicas == 0 else f"{_count(replicas, 'live replica')} left"
        parts.append(f"{experts} {have} {kept}")
    total = _count(int(counts.sum()), "expert")
    effect = (
        "Requests that need an uncovered expert wait for it, and fail if it does not come in time."
        if facts.uncovered
        else "No expert is uncovered: requests go on."
    )
    return f"Lost: replicas of {total}, counted over all MoE layers: {', '.join(parts)}. {effect}"


def _next(facts: Facts, dead_for_s: float) -> str:
    if facts.sources["balancer"].silent_since is not None:
        return "Next: nothing, as the balancer does not answer. Start it again first."
    elsewhere = "loads its experts on the other servers, as far as they have memory"
    if facts.uncovered:
        return f"Next: the balancer {elsewhere}; those without a live replica now."
    if facts.dead_grace_s is None:
        return f"Next: the balancer {elsewhere}, unless it comes back soon."
    left_s = facts.dead_grace_s - dead_for_s
    if left_s <= 0:
        return f"Next: the balancer {elsewhere}, now."
    rounded_s = math.ceil(left_s / _ROUNDED_S) * _ROUNDED_S
    return f"Next: the balancer {elsewhere}, unless it comes back within {rounded_s} s."


def _again(facts: Facts, missed: int) -> list[Child]:
    servers = len(facts.live(Role.EXPERT_SERVER)) + missed
    return [
        "To start again what ended: ",
        h("code", f"eaas scale {servers}"),
        ", or the command that ",
        h("code", "eaas up"),
        " printed at that moment.",
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
