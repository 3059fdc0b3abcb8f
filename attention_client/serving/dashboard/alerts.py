"""The alerts at the top of the dashboard's page. Pure: snapshot in, elements out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attention_client.serving.dashboard.nodes import Child, Node, h
from eaas.cluster_snapshot import ClusterSnapshot
from eaas.counted import counted
from eaas.types import MemberState, Role

__all__ = ["CANNOT_BE_DRAWN", "alerts"]

_NAMED = 6
# Seconds are rounded, because screen readers would read a number aloud each time it changes.
_ROUNDED_S = 10

CANNOT_BE_DRAWN = h(
    "p",
    "The cluster cannot be shown. The data below is old. The endpoint's log has the reason.",
    class_="alert",
    key="endpoint",
)
"""Alert in place of the others after a failed poll."""


def alerts(snapshot: ClusterSnapshot) -> list[Node]:
    """Build the alerts: unreachable sources, uncovered experts, dead servers. Empty if all is well.

    Each has a key, by which a viewer dismisses it.
    """
    lines = {}
    for source in snapshot.sources.values():
        if source.silent_since is not None:
            left = "" if source.name == "endpoint" else "; its last data is shown"
            lines[source.name] = f"{source.text(snapshot.at)} ({source.why}){left}"
    if snapshot.uncovered:
        pairs = [f"{layer}/{expert}" for layer, expert in snapshot.uncovered]
        count = counted(len(pairs), "expert")
        named = _first_few(pairs)
        # More of them are a new alert.
        lines[f"{count} uncovered"] = f"{count} uncovered: no live replica of layer/expert {named}"
    told = [h("p", line, class_="alert", key=key) for key, line in lines.items()]
    return told + _dead_servers(snapshot)


def _dead_servers(snapshot: ClusterSnapshot) -> list[Node]:
    dead = [
        m
        for m in snapshot.members
        if m.member.role is Role.EXPERT_SERVER and m.member.state is MemberState.DEAD
    ]
    if not dead:
        return []
    names = [m.member.id for m in dead]
    placement = snapshot.placement
    missed = [m for m in dead if placement is not None and m.member.id in placement.servers]
    details: list[list[Child]]
    if placement is None:
        details = [["Which experts are lost is not known yet: the placement has not been read."]]
    elif missed:
        # The balancer replaces the server that has been dead longest first.
        waited_s = max(m.lease_age_s for m in missed)
        details = [[_lost(snapshot)], [_next(snapshot, waited_s)], _restart(snapshot, len(missed))]
    else:
        details = [["Nothing is lost: the placement has no expert there."]]
    return [
        h(
            "div",
            h("p", h("strong", f"{_first_few(names)} {'is' if len(names) == 1 else 'are'} DEAD.")),
            *(h("p", *detail) for detail in details),
            class_="alert" if missed or placement is None else "alert mild",
            key=f"dead {' '.join(names)}",
        )
    ]


def _lost(snapshot: ClusterSnapshot) -> str:
    """Say, for the alert of dead servers, how many live replicas their experts still have."""
    assert snapshot.placement is not None
    lost_LE = snapshot.placement.replicas.count_LE(~snapshot.live_S) > 0
    left, counts = np.unique(snapshot.live_replicas_LE[lost_LE], return_counts=True)
    parts = []
    for replicas, experts in zip(left.tolist(), counts.tolist(), strict=True):
        have = "has" if experts == 1 else "have"
        kept = "no live replica" if replicas == 0 else f"{counted(replicas, 'live replica')} left"
        parts.append(f"{experts} {have} {kept}")
    total = counted(int(counts.sum()), "expert")
    effect = (
        "Requests that need an uncovered expert wait, and fail if it is not loaded in time."
        if snapshot.uncovered
        else "No expert is uncovered: requests continue."
    )
    return f"Lost: replicas of {total}, counted over all MoE layers: {', '.join(parts)}. {effect}"


def _next(snapshot: ClusterSnapshot, dead_for_s: float) -> str:
    if snapshot.sources["balancer"].silent_since is not None:
        return "Next: nothing, because the balancer does not answer. Restart it first."
    loads = "the balancer loads its experts on other servers, within their memory"
    if snapshot.uncovered:
        return f"Next: {loads}; experts without a live replica come first."
    if snapshot.dead_grace_s is None:
        return f"Next: {loads}, unless it returns soon."
    left_s = snapshot.dead_grace_s - dead_for_s
    if left_s <= 0:
        return f"Next: {loads}, now."
    rounded_s = math.ceil(left_s / _ROUNDED_S) * _ROUNDED_S
    return f"Next: {loads}, unless it returns within {rounded_s} s."


def _restart(snapshot: ClusterSnapshot, missed: int) -> list[Child]:
    servers = len(snapshot.live(Role.EXPERT_SERVER)) + missed
    return [
        "To start replacements: ",
        h("code", f"eaas scale {servers}"),
        ", or the command that ",
        h("code", "eaas up"),
        " printed.",
    ]


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
