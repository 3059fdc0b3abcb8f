"""One frame of `eaas top`: a snapshot in, a Rich renderable of 80 columns out. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.model import Event, Load, MemberSnapshot
from eaas.counted import counted
from eaas.types import MemberState, Role
from eaas_cli.commands.client import STATE_COLOURS, unreachable_text

__all__ = ["COLUMNS", "frame"]

COLUMNS = 80
"""Width of a frame: no line is longer."""

_NAME = 24
_UNKNOWN = "-"
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#"
# Load that fills a bar, relative to the mean of its layer.
_FULL = 2.0
_LAYERS = COLUMNS - _NAME - 12
# Lines outside the tables' rows: head, rates, balance, and a blank line and a title for each table.
_HEAD_LINES = 9
_LEAST_EVENTS = 3
# Largest numbers of lines on servers that clients cannot reach, and on servers that load experts.
_NOTES = 3
_LOADS = 8
_EVENT_COLOURS = {
    "dead": "red",
    "uncovered": "bold red",
    "unreachable": "red",
    "suspected": "yellow",
    "failover": "yellow",
    "rebalance": "cyan",
}


def frame(
    endpoint: str, snapshot: ClusterSnapshot, lines: int, *, ascii_only: bool = False
) -> RenderableType:
    """Draw a snapshot of the cluster as one frame.

    Args:
        lines: Height of the terminal.
        ascii_only: Draw bars without block characters.
    """
    notes = min(_NOTES, sum(1 for m in snapshot.members if m.unreachable))
    notes += min(_LOADS, sum(1 for m in snapshot.members if m.loading))
    free = max(2 * _LEAST_EVENTS + 2, lines - _HEAD_LINES - notes)
    servers = snapshot.load.servers if snapshot.load is not None else ()
    loads = min(len(servers), max(2, free // 4)) if servers else 0
    members = min(len(snapshot.members), max(2, free - loads - _LEAST_EVENTS - 2))
    events = max(_LEAST_EVENTS, free - loads - members - 2)
    parts: list[RenderableType] = [
        _head(endpoint, snapshot),
        _rates(snapshot),
        _balance(snapshot),
        Text(),
        _members(snapshot, members),
    ]
    if snapshot.load is not None and loads:
        parts += [Text(), _loads(snapshot.load, loads, _ASCII_BARS if ascii_only else _BARS)]
    parts += [Text(), _events(snapshot.events[:events], snapshot.at)]
    return Group(*parts)


def _head(endpoint: str, snapshot: ClusterSnapshot) -> Text:
    epoch = snapshot.placement.epoch if snapshot.placement is not None else _UNKNOWN
    text = Text(f"{endpoint}   epoch {epoch}   experts: ", no_wrap=True, overflow="ellipsis")
    if snapshot.placement is None:
        text.append("not known yet", "bold red")
    elif snapshot.uncovered:
        layer, expert = snapshot.uncovered[0]
        text.append(f"{len(snapshot.uncovered)} uncovered (first {layer}/{expert})", "bold red")
    else:
        nodes = counted(snapshot.min_nodes, "node")
        text.append(f"at least {snapshot.min_replicas} live, on {nodes}")
    return text


def _rates(snapshot: ClusterSnapshot) -> Text:
    counters, rates = snapshot.counters, snapshot.rates
    pace = running = waiting = _UNKNOWN
    if rates.tokens_per_s is not None:
        pace = f"{rates.tokens_per_s:.1f}"
    if counters is not None:
        running, waiting = f"{counters.running:.0f}", f"{counters.waiting:.0f}"
    return Text(
        f"tokens/s {pace}   TTFT {_ms(rates.ttft_s)}   ITL {_ms(rates.itl_s)}   "
        f"running {running}   waiting {waiting}",
        no_wrap=True,
    )


def _balance(snapshot: ClusterSnapshot) -> Text:
    text = Text(
        f"PAR {_number(snapshot.par)}   bound {_number(snapshot.bound)}   gap {_number(snapshot.gap)}",
        no_wrap=True,
        overflow="ellipsis",
    )
    for source in snapshot.sources.values():
        if source.silent_since is not None:
            text.append(f"   {source.text(snapshot.at)}", "bold red")
    return text


def _members(snapshot: ClusterSnapshot, most: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, width=COLUMNS, show_edge=False)
    table.add_column("MEMBER", width=_NAME, no_wrap=True, overflow="ellipsis")
    table.add_column("STATE", width=8)
    for column in ("LIFE", "EXPERTS", "BUSY", "LOAD", "FLIGHT", "HEARD"):
        table.add_column(column, justify="right", no_wrap=True)
    shares = _shares(snapshot.load)
    chosen = _chosen(snapshot.members, shares, most)
    notes: list[Text] = []
    loads = [
        Text(f"{m.member.id} loads {m.loading.text}", "cyan", no_wrap=True, overflow="ellipsis")
        for m in snapshot.members
        if m.loading is not None
    ]
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
            str(m.member.in_flight) if not m.member.state.is_gone else _UNKNOWN,
            f"{m.lease_age_s:.1f} s" if not m.member.state.is_gone else _UNKNOWN,
        )
        if m.unreachable:
            why = unreachable_text(m.unreachable)
            notes.append(Text(f"{m.member.id}: {why}", "red", no_wrap=True, overflow="ellipsis"))
    left = len(snapshot.members) - len(chosen)
    more = [Text(f"and {left} more", "dim")] if left else []
    return Group(table, *notes[:_NOTES], *loads[:_LOADS], *more)


def _chosen(
    members: Sequence[MemberSnapshot], shares: Mapping[str, float], most: int
) -> list[MemberSnapshot]:
    """Choose up to `most` members to show: those that are not SERVING, then the busiest. Keeps the order."""
    if len(members) <= most:
        return list(members)

    def need(m: MemberSnapshot) -> tuple[bool, float]:
        return m.member.state is MemberState.SERVING, -shares.get(m.member.id, 0.0)

    kept = {m.member.id for m in sorted(members, key=need)[: most - 1]}
    return [m for m in members if m.member.id in kept]


def _shares(load: Load | None) -> dict[str, float]:
    """Compute each server's work (tokens over speed) relative to the mean: column LOAD."""
    if load is None or not load.tokens_LS.any():
        return {}
    work_S = load.tokens_LS.sum(axis=0) / load.speeds_S
    return dict(zip(load.servers, (work_S / work_S.mean()).tolist(), strict=True))


def _loads(load: Load, most: int, bars: str) -> RenderableType:
    """Draw a row per server and a bar per layer or group of layers: load relative to the layer's mean."""
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
        text.append("\nnone yet", "not bold dim")
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
