"""The dashboard's heatmaps and charts, each with its numbers in text or a table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from attention_client.serving.dashboard.charts import BALANCE, SHARE, Line, chart, heatmap
from attention_client.serving.dashboard.nodes import Node, h
from attention_client.serving.dashboard.tables import badge, cell, empty, or_none, row, table
from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.model import Load
from eaas.counted import counted
from eaas.types import MemberState

__all__ = ["curves", "load", "placement"]

# Longer names, together, do not fit below a heat map.
_NAMED_CHARACTERS = 40


def load(snapshot: ClusterSnapshot) -> list[Node]:
    """Draw each expert server's load by MoE layer in the balancer's window, with a table of the servers."""
    found = snapshot.load
    if found is None:
        return empty("The load is not known yet.")
    if not found.tokens_LS.any():
        return empty("No expert has computed anything in the balancer's window.")
    relative_LS = _relative(found)
    layers, servers = relative_LS.shape
    worst = int(found.par_L.argmax())
    label = (
        f"Heatmap of {layers} MoE layers by {servers} expert servers. Layer {worst} is the most uneven, "
        f"with a PAR of {found.par_L[worst]:.2f}. The table has the sums by server."
    )
    total_S = found.tokens_LS.sum(axis=0)
    mean_S = relative_LS.mean(axis=0)
    rows = [
        row(
            name,
            cell(f"{tokens:,.0f}", number=True),
            cell(f"{relative:.2f}", number=True),
            cell(f"{speed:.2f}", number=True),
        )
        for name, tokens, relative, speed in zip(
            found.servers, total_S, mean_S, found.speeds_S, strict=True
        )
    ]
    note = (
        f"Rows: MoE layers 0 to {layers - 1}. Columns: expert servers. Value: (token, expert) pairs divided "
        f"by speed, relative to the layer's mean, in the last {found.window_s:.0f} s with load."
    )
    return [
        h("p", note, class_="note"),
        heatmap(relative_LS / 2, BALANCE, label),
        _axis(found.servers),
        h(
            "p",
            *(h("span", class_="below"), " idle "),
            *(h("span", class_="mean"), " mean "),
            *(h("span", class_="above"), " twice the mean or more"),
            class_="legend",
        ),
        h(
            "details",
            h("summary", "Numbers by server"),
            table("Load of each server", ("Server", "Pairs", "Load / mean", "Speed"), rows),
        ),
    ]


def _relative(found: Load) -> np.ndarray:
    """Load of each server, (token, expert) pairs by speed, over the layer's mean; 1 for an idle layer."""
    time_LS = found.tokens_LS / found.speeds_S
    mean_L = time_LS.mean(axis=1, keepdims=True)
    return np.where(mean_L > 0, time_LS / np.where(mean_L > 0, mean_L, 1.0), 1.0)


def _axis(names: Sequence[str]) -> Node:
    short = [name.removeprefix("expert-server-") for name in names]
    if len(short) * max(map(len, short)) > _NAMED_CHARACTERS:
        ends = (h("bdi", names[0]), " … ", h("bdi", names[-1]))
        return h("p", f"{len(names)} servers: ", *ends, class_="note axis")
    return h("div", *(h("span", name) for name in short), class_="axis", aria_hidden="true")


def placement(snapshot: ClusterSnapshot, layer: int) -> list[Node]:
    """Draw the placement of one MoE layer, experts by servers. A layer beyond the last counts as the last."""
    placed = snapshot.placement
    if placed is None:
        return empty("The placement is not known yet.")
    layer = min(max(layer, 0), placed.shape[0] - 1)
    holds_SE, shares_SE = placed.replicas.layer(layer)
    left, counts = np.unique(snapshot.live_replicas_LE[layer], return_counts=True)
    parts = (
        f"{count} with {counted(int(replicas), 'live replica')}"
        for replicas, count in zip(left, counts, strict=True)
    )
    covered = ", ".join(parts)
    servers, experts = holds_SE.shape
    label = (
        f"Layer {layer}: {experts} experts by {servers} servers; {covered}. The table lists them."
    )
    # A replica with share 0 is still shown; a replica on a dead server is not.
    live_SE = holds_SE & snapshot.live_S[:, None]
    shown_SE = np.where(live_SE, np.maximum(shares_SE, 0.04), 0.0)
    states = {m.member.id: m.member.state for m in snapshot.members}
    rows = [
        row(
            name,
            badge(states.get(name, MemberState.DEAD).value),
            cell(str(int(live_SE[s].sum())), number=True),
            cell(_ranges(np.flatnonzero(holds_SE[s]))),
        )
        for s, name in enumerate(placed.servers)
    ]
    note = (
        f"Rows: servers (empty: the server is gone). Columns: experts 0 to {experts - 1}. A darker cell "
        f"takes a larger share of the expert's tokens. {covered}."
    )
    return [
        h("p", note, class_="note"),
        heatmap(shown_SE, SHARE, label, least_px=18),
        h(
            "details",
            h("summary", "Experts by server"),
            table(
                f"Placement of layer {layer}", ("Server", "State", "Live replicas", "Experts"), rows
            ),
        ),
    ]


def _ranges(experts: Iterable[int]) -> str:
    """Format ascending expert numbers, with runs as "3-7"."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and runs[-1][-1] == expert - 1:
            runs[-1][1:] = [int(expert)]
        else:
            runs.append([int(expert)])
    return ", ".join("-".join(map(str, run)) for run in runs)


def curves(snapshot: ClusterSnapshot) -> list[Node]:
    """Draw PAR with its bound, tokens/s, TTFT and ITL over time, and the numbers of requests."""
    points, now, counters = snapshot.curve, snapshot.rates, snapshot.counters
    ages_s = [snapshot.at - p.at for p in points]
    mean = "mean of the last 10 s"
    figures = (
        chart(
            "PAR",
            f"{or_none(snapshot.par)}, bound {or_none(snapshot.bound)}, gap {or_none(snapshot.gap)}",
            ages_s,
            [
                Line("par", "PAR", [p.par for p in points]),
                Line("bound", "bound", [p.bound for p in points]),
            ],
            least=1.0,
        ),
        chart(
            "Tokens/s",
            or_none(now.tokens_per_s, "{:.1f}"),
            ages_s,
            [Line("rate", mean, [p.rates.tokens_per_s for p in points])],
            unit="/s",
        ),
        chart(
            "Time to first token",
            or_none(now.ttft_s, "{:.0f} ms", 1e3),
            ages_s,
            [Line("rate", mean, [_ms(p.rates.ttft_s) for p in points])],
            unit="ms",
        ),
        chart(
            "Inter-token latency",
            or_none(now.itl_s, "{:.0f} ms", 1e3),
            ages_s,
            [Line("rate", mean, [_ms(p.rates.itl_s) for p in points])],
            unit="ms",
        ),
    )
    queue = (
        f"Requests: {counters.running:.0f} running, {counters.waiting:.0f} waiting. "
        if counters
        else ""
    )
    note = (
        f"{queue}PAR: peak-to-average ratio of the servers' loads, 1 is balanced. Bound: the least PAR of "
        "any placement with these slots. Gap: PAR / bound."
    )
    return [h("p", note, class_="note"), h("div", *figures, class_="figures")]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
