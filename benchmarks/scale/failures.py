"""Failures and upgrades of a large cluster, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.scale.cluster import Cluster, Sizes
from eaas_cli.bench.command import figure

__all__ = ["simulate_failures", "simulate_upgrade"]

_REST_S = 400.0
# Servers of a rolling upgrade that are simulated.
_UPGRADED = 3


def simulate_failures(sizes: Sizes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Simulate the loss of a server, of a node, and of a rack with and without racks in the names.

    Returns:
        Rows of part `failures` (see the package).
    """
    rows = []
    for names_racks in (True, False):
        made = replace(sizes, names_racks=names_racks)
        for what in ("server", "node", "rack") if names_racks else ("rack",):
            say(f"loss of a {what}" + ("" if names_racks else ", racks not named"))
            cluster = Cluster(made)
            victims = {
                "server": list(cluster.servers[:1]),
                "node": cluster.on_node(0),
                "rack": cluster.in_rack(0),
            }[what]
            cluster.kill(victims)
            cluster.run(_REST_S)
            rows.append(_row(what if names_racks else "rack, not named", len(victims), cluster))
    return rows


def simulate_upgrade(sizes: Sizes, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Simulate the begin of a rolling upgrade: servers drained one by one, killed one by one, by nodes.

    Returns:
        Rows, each with `step_s`: simulated seconds of a step, and `steps` of the whole upgrade.
    """
    rows = []
    for how in ("drained", "restarted", "node restarted"):
        say(f"upgrade, {how}")
        cluster = Cluster(sizes)
        steps = sizes.nodes if how == "node restarted" else sizes.servers
        for step in range(_UPGRADED):
            batch = cluster.on_node(step) if how == "node restarted" else [cluster.servers[step]]
            if how == "drained":
                cluster.drain(batch)
                _until(cluster, partial(_has_left, cluster, batch))
            else:
                cluster.kill(batch)
            cluster.start(batch)
            _until(cluster, partial(_is_back, cluster, batch))
        rows.append(
            _row(how, sizes.servers // steps, cluster)
            | {"step_s": figure(cluster.elapsed_s / _UPGRADED), "steps": steps}
        )
    return rows


def _has_left(cluster: Cluster, servers: list[str]) -> bool:
    return cluster.left() == servers


def _is_back(cluster: Cluster, servers: list[str]) -> bool:
    return cluster.serves(servers) and cluster.is_at_rest


def _until(cluster: Cluster, is_over: Callable[[], bool]) -> None:
    end_s = cluster.now + _REST_S
    while not is_over():
        if cluster.now > end_s:
            raise RuntimeError("the simulated upgrade does not go on")
        cluster.run(0.5)


def _row(what: str, servers: int, cluster: Cluster) -> dict[str, Any]:
    line = cluster.timeline
    return {
        "what": what,
        "servers": servers,
        "uncovered": line.most("uncovered"),
        "covered_s": line.zero_since_s("uncovered"),
        "single": line.most("single"),
        "whole_s": line.zero_since_s("uncovered", "single"),
        "imbalance_before": line.points[0].imbalance,
        "imbalance": line.most("imbalance"),
        "loads": cluster.loads,
    }
