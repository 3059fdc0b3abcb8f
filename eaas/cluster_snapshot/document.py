"""A cluster snapshot as JSON: for `eaas top --json` and, with more, for the dashboard's page. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from eaas.cluster_snapshot.alerts import alerts
from eaas.cluster_snapshot.model import ClusterSnapshot, MemberSnapshot, Point

__all__ = ["document", "encode", "page_document"]


def encode(found: dict[str, Any]) -> str:
    """Write a document as JSON, which has neither NaN nor infinity: they become null."""
    try:
        return json.dumps(found, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return encode(json.loads(json.dumps(found), parse_constant=lambda _: None))


def document(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """Convert a snapshot to a document of `eaas top --json`; the endpoint's address is the caller's."""
    counters, load, now = snapshot.counters, snapshot.load, snapshot.at
    return {
        "epoch": snapshot.placement.epoch if snapshot.placement is not None else 0,
        "alerts": [asdict(alert) for alert in alerts(snapshot)],
        "sources": {
            name: {
                "silent_s": None if s.silent_since is None else now - s.silent_since,
                "why": s.why,
            }
            for name, s in snapshot.sources.items()
        },
        "members": [_member(m) for m in snapshot.members],
        "coverage": None
        if snapshot.placement is None
        else {
            "uncovered": [list(pair) for pair in snapshot.uncovered],
            "min_replicas": snapshot.min_replicas,
            "min_nodes": snapshot.min_nodes,
        },
        "requests": {
            "running": counters.running if counters else None,
            "waiting": counters.waiting if counters else None,
            "migrations": sum(counters.migrations.values()) if counters else None,
        },
        "rates": asdict(snapshot.rates),
        "balance": {"par": snapshot.par, "bound": snapshot.bound, "gap": snapshot.gap},
        "load": None
        if load is None
        else {
            "servers": list(load.servers),
            "tokens": load.tokens_LS.tolist(),
            "speeds": load.speeds_S.tolist(),
            "par": load.par_L.tolist(),
            "window_s": load.window_s,
        },
        "events": [
            {"ago_s": now - e.at, "kind": e.kind, "subject": e.subject, "text": e.text}
            for e in snapshot.events
        ],
        "decisions": None
        if snapshot.decisions is None
        else [asdict(d) | {"is_counted": d.is_counted} for d in snapshot.decisions],
    }


def _member(m: MemberSnapshot) -> dict[str, Any]:
    loading = m.loading
    return {
        "id": m.member.id,
        "role": m.member.role.value,
        "is_engine": bool(m.member.engine_address),
        "state": m.member.state.value,
        "incarnation": m.member.incarnation,
        "experts": m.member.experts,
        "in_flight": m.member.in_flight,
        "utilisation": m.utilisation,
        "lease_age_s": m.lease_age_s,
        "pid": m.member.pid,
        "address": m.member.address,
        "unreachable": dict(m.unreachable),
        "loading": None
        if loading is None
        else {**asdict(loading), "left_s": loading.left_s, "text": loading.text},
    }


def page_document(snapshot: ClusterSnapshot, layer: int) -> dict[str, Any]:
    """Convert a snapshot to what the page draws: with curves, and the placement of an MoE layer.

    A layer beyond the last one counts as the last.
    """
    return document(snapshot) | {
        "curve": list(zip(*(_point(snapshot.at, p) for p in snapshot.curve), strict=True)),
        "placement": _placement(snapshot, layer),
    }


def _point(now: float, p: Point) -> list[float | None]:
    """Age in seconds, PAR, bound, tokens/s, TTFT and ITL."""
    values = p.at - now, p.par, p.bound, p.rates.tokens_per_s, p.rates.ttft_s, p.rates.itl_s
    return [None if value is None else round(value, 4) for value in values]


def _placement(snapshot: ClusterSnapshot, layer: int) -> dict[str, Any] | None:
    placed = snapshot.placement
    if placed is None:
        return None
    layers, experts = placed.replicas.layers, placed.replicas.experts
    layer = min(max(layer, 0), layers - 1)
    holds_SE, shares_SE = placed.replicas.layer(layer)
    left, counts = np.unique(snapshot.live_replicas_LE[layer], return_counts=True)
    return {
        "layers": layers,
        "layer": layer,
        "experts": experts,
        # Pairs: so many experts have so many live replicas.
        "live_replicas": np.stack([counts, left], axis=1).tolist(),
        "servers": [
            {
                "id": name,
                "is_live": bool(snapshot.live_S[s]),
                "experts": np.flatnonzero(holds_SE[s]).tolist(),
                "shares": shares_SE[s, holds_SE[s]].round(3).tolist(),
            }
            for s, name in enumerate(placed.servers)
        ],
    }
