"""The sections of the dashboard's page, drawn once for all viewers. Pure: snapshot in, elements out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attention_client.serving.dashboard.alerts import CANNOT_BE_DRAWN, alerts
from attention_client.serving.dashboard.nodes import Child, Node, encode, h
from attention_client.serving.dashboard.pictures import curves, load, placement
from attention_client.serving.dashboard.tables import ago, badge, cell, empty, or_none, row, table
from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.model import Decision
from eaas.counted import counted
from eaas.types import Member, MemberState, Role

__all__ = ["FAILED", "draw", "draw_placement"]

_EVENTS = 60

FAILED = encode(CANNOT_BE_DRAWN)
"""The section "alerts" after a failed poll."""


def draw(snapshot: ClusterSnapshot) -> dict[str, str]:
    """Draw and encode the sections that all viewers share, by name, after each poll."""
    return {name: encode(*section(snapshot)) for name, section in _SECTIONS.items()}


def draw_placement(snapshot: ClusterSnapshot, layer: int) -> str:
    """Draw and encode the section "placement" for the MoE layer that a viewer chose."""
    return encode(*placement(snapshot, layer))


def summary(snapshot: ClusterSnapshot) -> list[Node]:
    """Draw the cluster's key numbers, in one row."""
    servers = [m.member for m in snapshot.members if _is_server(m.member)]
    serving = or_none(None)
    if snapshot.members:
        serving = (
            f"{sum(m.state is MemberState.SERVING for m in servers)} of {len(servers)} serving"
        )
    rates = snapshot.rates
    covered = or_none(None)
    if snapshot.placement is not None:
        covered = f"≥ {snapshot.min_replicas}, on {counted(snapshot.min_nodes, 'node')}"
    if snapshot.uncovered:
        covered = f"{len(snapshot.uncovered)} uncovered"
    tiles = (
        ("Expert servers", serving),
        ("Live replicas", covered),
        ("Epoch", str(snapshot.placement.epoch) if snapshot.placement else or_none(None)),
        ("PAR", or_none(snapshot.par)),
        ("Bound", or_none(snapshot.bound)),
        ("Gap", or_none(snapshot.gap)),
        ("Tokens/s", or_none(rates.tokens_per_s, "{:.1f}")),
        ("TTFT", or_none(rates.ttft_s, "{:.0f} ms", 1e3)),
        ("ITL", or_none(rates.itl_s, "{:.0f} ms", 1e3)),
    )
    return [
        h(
            "dl",
            *(h("div", h("dt", name), h("dd", value)) for name, value in tiles),
            class_="tiles",
        )
    ]


def members(snapshot: ClusterSnapshot) -> list[Node]:
    """Draw the table of the cluster's members with state, incarnation, requests in flight and lease age.

    Below it, a line for each expert server that loads experts.
    """
    if not snapshot.members:
        return empty("No members are known yet.")
    rows = []
    for known in snapshot.members:
        member = known.member
        dead = member.state.is_gone
        experts = member.experts if _is_server(member) else None
        rows.append(
            row(
                member.id,
                badge(member.state.value),
                # The operator's page has buttons here (`Controls`); without them the column is hidden.
                cell(h("slot", data_member=member.id)),
                cell(str(member.incarnation), number=True, wide=True),
                cell(or_none(experts, "{:.0f}"), number=True, wide=True),
                cell(or_none(None) if dead else str(member.in_flight), number=True, wide=True),
                cell(or_none(known.utilisation, "{:.0%}"), number=True),
                cell(or_none(None if dead else known.lease_age_s, "{:.1f} s"), number=True),
                cell(str(member.pid), number=True, wide=True),
                cell(member.address, wide=True),
            )
        )
    wide = "Life", "Experts", "In flight", "PID", "Address"
    head = "Member", "State", "Actions", *wide[:3], "Busy", "Lease age", *wide[3:]
    loads = (
        h("p", h("bdi", m.member.id), f" loads {m.loading.text}", class_="note", key=m.member.id)
        for m in snapshot.members
        if m.loading is not None
    )
    return [table("Members", head, rows, wide), *loads]


def _is_server(member: Member) -> bool:
    return member.role is Role.EXPERT_SERVER


def events(snapshot: ClusterSnapshot) -> list[Node]:
    """Draw the time line of the cluster's events, newest first."""
    if not snapshot.events:
        return empty("No events since the first viewer opened this page.")
    items = [
        h(
            "li",
            h("time", ago(snapshot.at - event.at)),
            " ",
            h("strong", h("bdi", event.subject)),
            " ",
            h("bdi", event.text),
            class_=event.kind,
        )
        for event in snapshot.events[:_EVENTS]
    ]
    return [h("ol", *items, class_="events")]


def decisions(snapshot: ClusterSnapshot) -> list[Node]:
    """Draw the table of the balancer's last decisions with their reasons."""
    if snapshot.decisions is None:
        return empty("The balancer's decisions are not known yet.")
    if not snapshot.decisions:
        return empty("The balancer has made no decisions.")
    rows = [
        row(
            str(d.number),
            cell(d.trigger),
            cell(d.policy or or_none(None), wide=True),
            cell(d.verdict, wide=True),
            cell(_change(d), number=True),
            cell(str(d.transit) if d.is_counted else or_none(None), number=True),
            cell(d.reason + (f" Given up: {d.given_up}" if d.given_up else "")),
        )
        for d in snapshot.decisions
    ]
    head = ("No.", "Trigger", "Policy", "Verdict", "PAR", "Moves", "Why")
    return [table("Decisions of the balancer", head, rows, wide=("Policy", "Verdict"))]


def _change(decision: Decision) -> str:
    if not decision.par_now:
        return or_none(None)
    return f"{or_none(decision.par_now)} → {or_none(decision.par_then or None)}"


_SECTIONS: Mapping[str, Callable[[ClusterSnapshot], Sequence[Child]]] = {
    "alerts": alerts,
    "summary": summary,
    "members": members,
    "load": load,
    "curves": curves,
    "events": events,
    "decisions": decisions,
}
