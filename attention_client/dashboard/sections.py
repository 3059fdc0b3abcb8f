"""The parts of the page, each drawn from the facts. Pure: facts in, HTML out; every name is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

import numpy as np

from attention_client.dashboard.charts import BALANCE, SHARE, curve, heatmap
from eaas.facts import Facts
from eaas.facts.model import Decision, Load
from eaas.types import Member, MemberState, Role

__all__ = ["CANNOT_BE_DRAWN", "SECTIONS", "draw", "placement_of_layer"]

_EVENTS = 60
_LONG_AGO_S = 120
_NAMED = 6
_NONE = "—"
_WIDE = ' class="wide"'


CANNOT_BE_DRAWN = (
    '<p class="alert">The cluster cannot be shown: what is below is old. '
    "The endpoint's log says why.</p>"
)
"""In place of the alerts, where a look failed."""


def draw(facts: Facts) -> dict[str, str]:
    """Every section, by name."""
    return {name: section(facts) for name, section in SECTIONS.items()}


# -- what is wrong ---------------------------------------------------------------------------------------


def alerts(facts: Facts) -> str:
    """What an operator is to know first; empty where nothing is wrong."""
    lines = []
    for source in facts.sources.values():
        if source.silent_since is not None:
            left = "" if source.name == "endpoint" else "; what is shown of it is what it said last"
            lines.append(f"{source.text(facts.at)} ({source.why}){left}")
    if facts.uncovered:
        named = ", ".join(f"{layer}/{expert}" for layer, expert in facts.uncovered[:_NAMED])
        more = ", …" if len(facts.uncovered) > _NAMED else ""
        lines.append(
            f"{len(facts.uncovered)} experts uncovered: no live replica of layer/expert {named}{more}"
        )
    return "".join(f'<p class="alert">{escape(line)}</p>' for line in lines)


def summary(facts: Facts) -> str:
    """The figures that matter, in one row."""
    servers = [m.member for m in facts.members if _is_server(m.member)]
    serving = sum(m.state is MemberState.SERVING for m in servers)
    rates = facts.rates
    covered = "no placement" if facts.placement is None else f"≥ {facts.min_replicas} replicas"
    if facts.uncovered:
        covered = f"{len(facts.uncovered)} uncovered"
    tiles = (
        ("Expert servers", f"{serving} of {len(servers)} serving" if servers else "none"),
        ("Experts", covered),
        ("Epoch", str(facts.placement.epoch) if facts.placement else _NONE),
        ("PAR", _number(facts.par)),
        ("Bound", _number(facts.bound)),
        ("Gap", _number(facts.gap)),
        ("Tokens/s", f"{rates.tokens_per_s:.1f}"),
        ("TTFT", _milliseconds(rates.ttft_s)),
        ("ITL", _milliseconds(rates.itl_s)),
    )
    inner = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles">{inner}</dl>'


# -- members ---------------------------------------------------------------------------------------------


def members(facts: Facts) -> str:
    """Everybody, with state, life, load and the age of the lease."""
    if not facts.members:
        return '<p class="empty">No members are known yet.</p>'
    rows = []
    for known in facts.members:
        member = known.member
        dead = member.state is MemberState.DEAD
        cells = (
            _badge(member.state),
            f'<td class="number">{member.incarnation}</td>',
            f'<td class="number">{member.experts if _is_server(member) else _NONE}</td>',
            f'<td class="number">{_NONE if dead else member.in_flight}</td>',
            f'<td class="number">{_share(known.utilisation)}</td>',
            f'<td class="number">{_NONE if dead else f"{known.lease_age_s:.1f} s"}</td>',
            f'<td class="number wide">{member.pid}</td>',
            f'<td class="wide">{escape(member.address)}</td>',
        )
        rows.append(f'<tr><th scope="row">{escape(member.id)}</th>{"".join(cells)}</tr>')
    head = (
        "Member",
        "State",
        "Life",
        "Experts",
        "In flight",
        "Busy",
        "Lease age",
        "PID",
        "Address",
    )
    return _table("Members", head, rows, wide=("PID", "Address"))


def _is_server(member: Member) -> bool:
    return member.role is Role.EXPERT_SERVER


def _badge(state: MemberState) -> str:
    return f'<td><span class="state {state.value.lower()}">{state.value}</span></td>'


# -- load ------------------------------------------------------------------------------------------------


def load(facts: Facts) -> str:
    """Layers by servers, and the servers in figures."""
    found = facts.load
    if found is None or not found.tokens_LS.any():
        return '<p class="empty">No expert has computed anything in the balancer\'s window yet.</p>'
    relative_LS = _relative(found)
    layers, servers = relative_LS.shape
    worst = int(found.par_L.argmax())
    label = (
        f"Heatmap of {layers} MoE layers by {servers} expert servers. Most uneven is layer {worst} "
        f"with a PAR of {found.par_L[worst]:.2f}. The table has the sums of the servers."
    )
    total_S = found.tokens_LS.sum(axis=0)
    mean_S = relative_LS.mean(axis=0)
    names = zip(found.servers, total_S, mean_S, found.speeds_S, strict=True)
    rows = [
        f'<tr><th scope="row">{escape(name)}</th>'
        f'<td class="number">{tokens:,.0f}</td>'
        f'<td class="number">{load:.2f}</td>'
        f'<td class="number">{speed:.2f}</td></tr>'
        for name, tokens, load, speed in names
    ]
    table = _table("Load of each server", ("Server", "Pairs", "Load / mean", "Speed"), rows)
    axis = _axis(found.servers, "servers")
    return (
        f'<p class="note">Rows: MoE layers 0 to {layers - 1}. Columns: expert servers. Pairs of token and '
        f"expert over speed, by the layer's mean, in the last {found.window_s:.0f} s.</p>"
        f"{heatmap(relative_LS / 2, BALANCE, label)}{axis}"
        '<p class="legend"><span class="below"></span> idle <span class="mean"></span> mean '
        '<span class="above"></span> twice the mean and above</p>'
        f"<details><summary>Figures of the servers</summary>{table}</details>"
    )


def _relative(found: Load) -> np.ndarray:
    """Load of each server over the mean of its layer; 1 where a layer has had nothing."""
    time_LS = found.tokens_LS / found.speeds_S
    mean_L = time_LS.mean(axis=1, keepdims=True)
    return np.where(mean_L > 0, time_LS / np.where(mean_L > 0, mean_L, 1.0), 1.0)


def _axis(names: Sequence[str], what: str) -> str:
    if len(names) > 12:
        return f'<p class="note axis">{len(names)} {what}: {escape(names[0])} … {escape(names[-1])}</p>'
    short = (escape(name.removeprefix("expert-server-")) for name in names)
    return (
        f'<div class="axis" aria-hidden="true">{"".join(f"<span>{s}</span>" for s in short)}</div>'
    )


# -- balance ---------------------------------------------------------------------------------------------


def curves(facts: Facts) -> str:
    """PAR with its bound, tokens/s, TTFT and ITL over time."""
    points, now = facts.curve, facts.rates
    seconds = round(points[-1].at - points[0].at) if points else 0
    par = f"{_number(facts.par)}, bound {_number(facts.bound)}, gap {_number(facts.gap)}"
    shown: tuple[tuple[str, str, float, list[tuple[str, list[float | None]]]], ...] = (
        ("PAR", par, 1.0, [("bound", [p.bound for p in points]), ("par", [p.par for p in points])]),
        (
            "Tokens/s",
            f"{now.tokens_per_s:.1f}",
            0.0,
            [("rate", [p.rates.tokens_per_s for p in points])],
        ),
        (
            "Time to first token",
            _milliseconds(now.ttft_s),
            0.0,
            [("rate", [p.rates.ttft_s for p in points])],
        ),
        (
            "Between two tokens",
            _milliseconds(now.itl_s),
            0.0,
            [("rate", [p.rates.itl_s for p in points])],
        ),
    )
    parts = [
        f"<figure><figcaption>{name}: <strong>{value}</strong></figcaption>"
        f"{curve(lines, f'{name} over the last {seconds} s. Now: {value}.', least=least)}</figure>"
        for name, value, least, lines in shown
    ]
    counters = facts.counters
    queue = (
        f"{counters.running:.0f} requests run, {counters.waiting:.0f} wait. " if counters else ""
    )
    return (
        f'<p class="note">{queue}PAR: peak-to-average ratio of the servers\' loads, 1 is even; bound '
        "(dashed): the least that any placement with these slots can have; gap: the one by the other. "
        f"The others are means of the last 10 s.</p>"
        f'<div class="figures">{"".join(parts)}</div>'
    )


# -- placement -------------------------------------------------------------------------------------------


def placement_of_layer(facts: Facts, layer: int) -> str:
    """Experts by servers of one MoE layer."""
    placement = facts.placement
    if placement is None:
        return '<p class="empty">There is no placement yet.</p>'
    layer = min(max(layer, 0), placement.holds_LSE.shape[0] - 1)
    holds_SE, shares_SE = placement.holds_LSE[layer], placement.shares_LSE[layer]
    replicas_E = holds_SE.sum(axis=0)
    counts = ", ".join(
        f"{np.count_nonzero(replicas_E == n)} with {n} {'replica' if n == 1 else 'replicas'}"
        for n in np.unique(replicas_E)
    )
    servers, experts = holds_SE.shape
    label = (
        f"Layer {layer}: {experts} experts by {servers} servers; {counts}. The table has them all."
    )
    # A replica that takes nothing is a replica, too.
    shown_SE = np.where(holds_SE, np.maximum(shares_SE, 0.04), 0.0)
    states = {m.member.id: m.member.state for m in facts.members}
    rows = [
        f'<tr><th scope="row">{escape(name)}</th>'
        f"{_badge(states.get(name, MemberState.DEAD))}"
        f'<td class="number">{int(holds_E.sum())}</td><td>{_ranges(np.flatnonzero(holds_E))}</td></tr>'
        for name, holds_E in zip(placement.servers, holds_SE, strict=True)
    ]
    head = ("Server", "State", "Replicas", "Experts")
    return (
        f'<p class="note">Rows: servers. Columns: experts 0 to {experts - 1}. The darker, the larger the '
        f"share of the expert's tokens. {escape(counts)}.</p>"
        f"{heatmap(shown_SE, SHARE, label, least_px=18)}"
        f"<details><summary>Experts of each server</summary>"
        f"{_table(f'Placement of layer {layer}', head, rows)}</details>"
    )


def _ranges(experts: Iterable[int]) -> str:
    """Ascending numbers, runs of them as "3-7"."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and runs[-1][-1] == expert - 1:
            runs[-1][1:] = [int(expert)]
        else:
            runs.append([int(expert)])
    return ", ".join("-".join(map(str, run)) for run in runs)


# -- what happened ---------------------------------------------------------------------------------------


def events(facts: Facts) -> str:
    """The time line, the newest first."""
    if not facts.events:
        return '<p class="empty">Nothing has happened since this page\'s first viewer came.</p>'
    items = "".join(
        f'<li class="{event.kind}"><time>{_age(facts.at - event.at)}</time> '
        f"<strong>{escape(event.subject)}</strong> {escape(event.text)}</li>"
        for event in facts.events[:_EVENTS]
    )
    return f'<ol class="events">{items}</ol>'


def _age(seconds: float) -> str:
    if seconds < _LONG_AGO_S:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago"


def decisions(facts: Facts) -> str:
    """The balancer's last decisions and why."""
    if not facts.decisions:
        return '<p class="empty">The balancer has decided nothing yet.</p>'
    rows = [
        f'<tr><th scope="row">{d.number}</th><td>{escape(d.trigger)}</td>'
        f'<td class="wide">{escape(d.policy) or _NONE}</td><td class="wide">{escape(d.verdict)}</td>'
        f'<td class="number">{_change(d)}</td>'
        f'<td class="number">{d.transit if d.is_counted else _NONE}</td>'
        f"<td>{escape(d.reason)}{escape(f' Given up: {d.given_up}') if d.given_up else ''}</td></tr>"
        for d in facts.decisions
    ]
    head = ("No.", "Trigger", "Policy", "Verdict", "PAR", "Moves", "Why")
    return _table("Decisions of the balancer", head, rows, wide=("Policy", "Verdict"))


def _change(decision: Decision) -> str:
    if not decision.par_now:
        return _NONE
    return f"{_number(decision.par_now)} → {_number(decision.par_then or None)}"


# -- small things ----------------------------------------------------------------------------------------


def _table(caption: str, head: Iterable[str], rows: Iterable[str], wide: Iterable[str] = ()) -> str:
    """A table with a caption for screen readers; `wide` ones of its columns are for wide screens."""
    columns = "".join(
        f'<th scope="col"{_WIDE if name in wide else ""}>{name}</th>' for name in head
    )
    return (
        f'<table><caption class="unseen">{caption}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    return _NONE if value is None else f"{value * 1e3:.0f} ms"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0%}"


SECTIONS: Mapping[str, Callable[[Facts], str]] = {
    "alerts": alerts,
    "summary": summary,
    "members": members,
    "load": load,
    "curves": curves,
    "events": events,
    "decisions": decisions,
}
"""What is drawn once for all viewers, by name."""
