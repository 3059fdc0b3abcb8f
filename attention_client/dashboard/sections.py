"""The parts of the page, each drawn from the facts. Pure: facts in, elements out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attention_client.dashboard.alerts import CANNOT_BE_DRAWN, alerts
from attention_client.dashboard.nodes import Child, Node, encode, h
from attention_client.dashboard.pictures import curves, load, placement
from attention_client.dashboard.tables import ago, badge, cell, empty, or_none, row, table
from eaas.facts import Facts
from eaas.facts.model import Decision
from eaas.types import Member, MemberState, Role

__all__ = ["FAILED", "draw", "draw_placement"]

_EVENTS = 60

FAILED = encode(CANNOT_BE_DRAWN)
"""The section "alerts", where the facts could not be had or drawn."""


def draw(facts: Facts) -> dict[str, str]:
    """Every section that is the same for all viewers, by name, as `nodes.encode` writes it."""
    return {name: encode(*section(facts)) for name, section in _SECTIONS.items()}


def draw_placement(facts: Facts, layer: int) -> str:
    """The section "placement", of one MoE layer."""
    return encode(*placement(facts, layer))


def summary(facts: Facts) -> list[Node]:
    """The figures that matter, in one row."""
    servers = [m.member for m in facts.members if _is_server(m.member)]
    serving = sum(m.state is MemberState.SERVING for m in servers)
    rates = facts.rates
    covered = "no placement" if facts.placement is None else f"≥ {facts.min_replicas} of each"
    if facts.uncovered:
        covered = f"{len(facts.uncovered)} uncovered"
    tiles = (
        ("Expert servers", f"{serving} of {len(servers)} serving" if servers else "none"),
        ("Live replicas", covered),
        ("Epoch", str(facts.placement.epoch) if facts.placement else or_none(None)),
        ("PAR", or_none(facts.par)),
        ("Bound", or_none(facts.bound)),
        ("Gap", or_none(facts.gap)),
        ("Tokens/s", f"{rates.tokens_per_s:.1f}"),
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


def members(facts: Facts) -> list[Node]:
    """Everybody, with state, life, load and the age of the lease."""
    if not facts.members:
        return empty("No members are known yet.")
    rows = []
    for known in facts.members:
        member = known.member
        dead = member.state.is_gone
        rows.append(
            row(
                member.id,
                badge(member.state.value),
                cell(str(member.incarnation), number=True),
                cell(str(member.experts) if _is_server(member) else or_none(None), number=True),
                cell(or_none(None) if dead else str(member.in_flight), number=True),
                cell(or_none(known.utilisation, "{:.0%}"), number=True),
                cell(or_none(None if dead else known.lease_age_s, "{:.1f} s"), number=True),
                cell(str(member.pid), number=True, wide=True),
                cell(member.address, wide=True),
            )
        )
    head = "Member", "State", "Life", "Experts", "In flight", "Busy", "Lease age", "PID", "Address"
    return [table("Members", head, rows, wide=("PID", "Address"))]


def _is_server(member: Member) -> bool:
    return member.role is Role.EXPERT_SERVER


def events(facts: Facts) -> list[Node]:
    """The time line, the newest first."""
    if not facts.events:
        return empty("Nothing has happened since this page's first viewer came.")
    items = [
        h(
            "li",
            h("time", ago(facts.at - event.at)),
            " ",
            h("strong", h("bdi", event.subject)),
            " ",
            h("bdi", event.text),
            class_=event.kind,
        )
        for event in facts.events[:_EVENTS]
    ]
    return [h("ol", *items, class_="events")]


def decisions(facts: Facts) -> list[Node]:
    """The balancer's last decisions and why."""
    if not facts.decisions:
        return empty("The balancer has decided nothing yet.")
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
        for d in facts.decisions
    ]
    head = ("No.", "Trigger", "Policy", "Verdict", "PAR", "Moves", "Why")
    return [table("Decisions of the balancer", head, rows, wide=("Policy", "Verdict"))]


def _change(decision: Decision) -> str:
    if not decision.par_now:
        return or_none(None)
    return f"{or_none(decision.par_now)} → {or_none(decision.par_then or None)}"


_SECTIONS: Mapping[str, Callable[[Facts], Sequence[Child]]] = {
    "alerts": alerts,
    "summary": summary,
    "members": members,
    "load": load,
    "curves": curves,
    "events": events,
    "decisions": decisions,
}
