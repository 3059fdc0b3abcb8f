"""What is wrong with a cluster, what it cost and what happens next, in sentences. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eaas.cluster_snapshot.model import ClusterSnapshot
from eaas.counted import counted
from eaas.types import MemberState, Role

__all__ = ["Alert", "alerts"]

_NAMED = 6
# Seconds are rounded, because screen readers would read a number aloud each time it changes.
_ROUNDED_S = 10


@dataclass(frozen=True)
class Alert:
    """One thing that is wrong.

    Attributes:
        key: Identifies it while its numbers change.
        level: "bad", or "mild" if nothing is lost.
        lines: What is wrong, then its effect and the next step.
    """

    key: str
    level: str
    lines: tuple[str, ...]


def alerts(snapshot: ClusterSnapshot) -> list[Alert]:
    """List what is wrong: silent sources, uncovered experts, dead processes. Empty if all is well."""
    found = []
    for source in snapshot.sources.values():
        if source.silent_since is not None:
            left = "" if source.name == "endpoint" else "; its last data is shown"
            line = f"{source.text(snapshot.at)} ({source.why}){left}"
            found.append(Alert(source.name, "bad", (line,)))
    if snapshot.uncovered:
        count = f"{counted(len(snapshot.uncovered), 'expert')} uncovered"
        named = _first_few([f"{layer}/{expert}" for layer, expert in snapshot.uncovered])
        # More of them are another alert.
        found.append(Alert(count, "bad", (f"{count}: no live replica of layer/expert {named}",)))
    return found + _dead_servers(snapshot) + _dead_engines(snapshot)


def _dead_servers(snapshot: ClusterSnapshot) -> list[Alert]:
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
    if placement is None:
        details = ["Which experts are lost is not known yet: the placement has not been read."]
    elif missed:
        # The balancer replaces the server that has been dead longest first.
        waited_s = max(m.lease_age_s for m in missed)
        servers = len(snapshot.live(Role.EXPERT_SERVER)) + len(missed)
        command = f"`eaas scale {servers}`, or the command that `eaas up` printed"
        details = [_lost(snapshot), _next(snapshot, waited_s), f"To start replacements: {command}."]
    else:
        details = ["Nothing is lost: the placement has no expert there."]
    first = f"{_first_few(names)} {'is' if len(names) == 1 else 'are'} DEAD."
    level = "bad" if missed or placement is None else "mild"
    return [Alert(f"dead {' '.join(names)}", level, (first, *details))]


def _dead_engines(snapshot: ClusterSnapshot) -> list[Alert]:
    engines = [m.member for m in snapshot.members if m.member.engine_address]
    names = [member.id for member in engines if member.state is MemberState.DEAD]
    if not names:
        return []
    first = f"{_first_few(names)} {'is' if len(names) == 1 else 'are'} DEAD."
    if any(member.state is MemberState.SERVING for member in engines):
        effect = "Requests continue on another attention client."
        return [Alert(f"dead {' '.join(names)}", "mild", (first, effect))]
    effect = "No attention client serves: requests wait for one, and fail after a minute."
    return [Alert(f"dead {' '.join(names)}", "bad", (first, effect))]


def _lost(snapshot: ClusterSnapshot) -> str:
    """Say how many live replicas the experts of dead servers still have."""
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


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
