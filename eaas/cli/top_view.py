"""One frame of `eaas top`: facts in, a Rich renderable of 80 columns and so many lines out. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eaas.cli.client import STATE_COLOURS, unreachable_text
from eaas.facts import Facts
from eaas.facts.model import Event, Load, MemberFacts
from eaas.types import MemberState, Role

__all__ = ["COLUMNS", "document", "frame"]

COLUMNS = 80
"""Least width of a terminal: everything is made for it."""

_NAME = 24
_UNKNOWN = "-"
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#"
# A bar's full height is so many times the mean of its layer.
_FULL = 2.0
_LAYERS = COLUMNS - _NAME - 12
# Besides members, servers' loads and events: head, rates, balance, and a blank line and a title for each.
_HEAD_LINES = 9
_LEAST_EVENTS = 3
# Lines for servers that clients cannot reach.
_NOTES = 3
_EVENT_COLOURS = {
    "dead": "red",
    "uncovered": "bold red",
    "unreachable": "red",
    "suspected": "yellow",
    "failover": "yellow",
    "rebalance": "cyan",
}


def frame(endpoint: str, facts: Facts, lines: int, *, ascii_only: bool = False) -> RenderableType:
    """What is shown.

    Args:
        endpoint: URL of the cluster's endpoint.
        facts: Of this moment.
        lines: Height of the terminal.
        ascii_only: It shows no block characters.
    """
    notes = min(_NOTES, sum(1 for m in facts.members if m.unreachable))
    room = max(2 * _LEAST_EVENTS + 2, lines - _HEAD_LINES - notes)
    servers = facts.load.servers if facts.load is not None else ()
    loads = min(len(servers), max(2, room // 4)) if servers else 0
    members = min(len(facts.members), max(2, room - loads - _LEAST_EVENTS - 2))
    events = max(_LEAST_EVENTS, room - loads - members - 2)
    parts: list[RenderableType] = [
        _head(endpoint, facts),
        _rates(facts),
        _balance(facts),
        Text(),
        _members(facts, members),
    ]
    if facts.load is not None and loads:
        parts += [Text(), _loads(facts.load, loads, _ASCII_BARS if ascii_only else _BARS)]
    parts += [Text(), _events(facts.events[:events], facts.at)]
    return Group(*parts)


def _head(endpoint: str, facts: Facts) -> Text:
    epoch = facts.placement.epoch if facts.placement is not None else 0
    text = Text(f"{endpoint}   epoch {epoch}   experts: ", no_wrap=True, overflow="ellipsis")
    if facts.placement is None:
        text.append("not known yet", "bold red")
    elif facts.uncovered:
        layer, expert = facts.uncovered[0]
        text.append(f"{len(facts.uncovered)} uncovered (first {layer}/{expert})", "bold red")
    else:
        text.append(f"at least {facts.min_replicas} live")
    return text


def _rates(facts: Facts) -> Text:
    counters, rates = facts.counters, facts.rates
    pace, running, waiting = "-", "-", "-"
    if counters is not None:
        pace = f"{rates.tokens_per_s:.1f}"
        running, waiting = f"{counters.running:.0f}", f"{counters.waiting:.0f}"
    text = Text(
        f"tokens/s {pace}   TTFT {_ms(rates.ttft_s)}   ITL {_ms(rates.itl_s)}   "
        f"running {running}   waiting {waiting}",
        no_wrap=True,
    )
    return text


def _balance(facts: Facts) -> Text:
    text = Text(
        f"PAR {_number(facts.par)}   bound {_number(facts.bound)}   gap {_number(facts.gap)}",
        no_wrap=True,
        overflow="ellipsis",
    )
    for source in facts.sources.values():
        if source.silent_since is not None:
            text.append(f"   {source.text(facts.at)}", "bold red")
    return text


def _members(facts: Facts, most: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, width=COLUMNS, show_edge=False)
    table.add_column("MEMBER", width=_NAME, no_wrap=True, overflow="ellipsis")
    table.add_column("STATE", width=8)
    for column in ("LIFE", "EXPERTS", "BUSY", "LOAD", "FLIGHT", "HEARD"):
        table.add_column(column, justify="right", no_wrap=True)
    shares = _shares(facts.load)
    chosen = _chosen(facts.members, shares, most)
    notes: list[Text] = []
    for m in chosen:
        is_server = m.member.role is Role.EXPERT_SERVER
        state = m.member.state.value
        table.add_row(
            m.member.id,
            Text(state, style=STATE_COLOURS.get(state, "")),
            str(m.member.incarnation),
            str(m.member.experts) if is_server else "",
            _percent(m.utilisation) if is_server else "",
            _number(shares.get(m.member.id)) if is_server else "",
            str(m.member.in_flight),
            f"{m.lease_age_s:.1f} s" if not m.member.state.is_gone else _UNKNOWN,
        )
        if m.unreachable:
            why = unreachable_text(m.unreachable)
            notes.append(Text(f"{m.member.id}: {why}", "red", no_wrap=True, overflow="ellipsis"))
    left = len(facts.members) - len(chosen)
    more = [Text(f"and {left} more", "dim")] if left else []
    return Group(table, *notes[:_NOTES], *more)


def _chosen(
    members: Sequence[MemberFacts], shares: Mapping[str, float], most: int
) -> list[MemberFacts]:
    """All of them in their order; of too many, those that need a look: not SERVING, then busiest."""
    if len(members) <= most:
        return list(members)

    def need(m: MemberFacts) -> tuple[bool, float]:
        return m.member.state is MemberState.SERVING, -shares.get(m.member.id, 0.0)

    kept = {m.member.id for m in sorted(members, key=need)[: most - 1]}
    return [m for m in members if m.member.id in kept]


def _shares(load: Load | None) -> dict[str, float]:
    """Each server's tokens over the servers' mean, speeds taken into account."""
    if load is None or not load.tokens_LS.any():
        return {}
    work_S = load.tokens_LS.sum(axis=0) / load.speeds_S
    return dict(zip(load.servers, (work_S / work_S.mean()).tolist(), strict=True))


def _loads(load: Load, most: int, bars: str) -> RenderableType:
    """A row for each server, a bar for each layer (or group of layers): its load over the layer's mean."""
    layers = len(load.par_L)
    groups = np.array_split(np.arange(layers), min(layers, _LAYERS))
    work_LS = load.tokens_LS / load.speeds_S
    work_GS = np.array([work_LS[group].sum(axis=0) for group in groups])
    mean_G1 = work_GS.mean(axis=1, keepdims=True)
    ratio_GS = np.divide(work_GS, mean_G1, out=np.zeros_like(work_GS), where=mean_G1 > 0)
    order = np.argsort(-work_LS.sum(axis=0), kind="stable")
    each = "" if len(groups) == layers else f", {-(-layers // len(groups))} layers a bar"
    title = f"LOAD BY LAYER (full: {_FULL:.0f} times the layer's mean{each})"
    text = Text(title, "bold", no_wrap=True)
    shown = sorted(order[:most].tolist()) if len(order) > most else range(len(order))
    for s in shown:
        steps = np.clip(ratio_GS[:, s] / _FULL * len(bars), 0, len(bars) - 1).astype(int)
        text.append(f"\n{load.servers[s][:_NAME]:<{_NAME}} ", "not bold")
        for step, ratio in zip(steps.tolist(), ratio_GS[:, s].tolist(), strict=True):
            text.append(bars[step], "not bold red" if ratio >= 1.5 else "not bold")
    return text


def _events(events: Sequence[Event], now: float) -> RenderableType:
    text = Text("EVENTS", "bold", no_wrap=True, overflow="ellipsis")
    if not events:
        text.append("\nnone since this began", "not bold dim")
    for event in events:
        ago = f"{now - event.at:.0f} s ago"
        style = f"not bold {_EVENT_COLOURS.get(event.kind, '')}".strip()
        text.append(f"\n{ago:>9}  {event.subject} {event.text}", style)
    return text


def _ms(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds * 1e3:.0f} ms"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"


def document(endpoint: str, facts: Facts) -> dict[str, Any]:
    """The facts for programs: what `eaas top --json` prints."""
    counters, load, now = facts.counters, facts.load, facts.at
    return {
        "endpoint": endpoint,
        "epoch": facts.placement.epoch if facts.placement is not None else 0,
        "sources": {
            name: {
                "silent_s": None if s.silent_since is None else now - s.silent_since,
                "why": s.why,
            }
            for name, s in facts.sources.items()
        },
        "members": [
            {
                "id": m.member.id,
                "role": m.member.role.value,
                "state": m.member.state.value,
                "incarnation": m.member.incarnation,
                "experts": m.member.experts,
                "in_flight": m.member.in_flight,
                "utilisation": m.utilisation,
                "lease_age_s": m.lease_age_s,
                "unreachable": dict(m.unreachable),
            }
            for m in facts.members
        ],
        "coverage": None
        if facts.placement is None
        else {
            "uncovered": [list(pair) for pair in facts.uncovered],
            "min_replicas": facts.min_replicas,
        },
        "requests": {
            "running": counters.running if counters else None,
            "waiting": counters.waiting if counters else None,
        },
        "rates": {
            "tokens_per_s": facts.rates.tokens_per_s if counters else None,
            "ttft_s": facts.rates.ttft_s,
            "itl_s": facts.rates.itl_s,
        },
        "balance": {"par": facts.par, "bound": facts.bound, "gap": facts.gap},
        "load": None
        if load is None
        else {"servers": list(load.servers), "tokens": load.tokens_LS.tolist()},
        "events": [
            {"ago_s": now - e.at, "kind": e.kind, "subject": e.subject, "text": e.text}
            for e in facts.events
        ],
    }
