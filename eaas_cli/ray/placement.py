"""Which nodes of a Ray cluster take which roles, for `eaas up --on ray`. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eaas.errors import ConfigError

__all__ = [
    "Node",
    "actor_options",
    "least_loaded",
    "live_nodes",
    "monitor_candidates",
    "monitor_places",
    "refuse_open_network",
]

_HEAD = "node:__internal_head__"
_NODE_LABEL = "ray.io/node-id"
# Members know this many addresses of the monitor: it moves to the next when its node is lost.
_CANDIDATES = 3


@dataclass(frozen=True)
class Node:
    """A live node of a Ray cluster.

    Attributes:
        node_id: Ray's id.
        address: IP address.
        is_head: Whether Ray's control service (GCS) runs there.
    """

    node_id: str
    address: str
    is_head: bool


def live_nodes(table: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Select the live nodes from `ray.nodes()`, the head first, the others by address."""
    nodes = [
        Node(row["NodeID"], row["NodeManagerAddress"], _HEAD in row["Resources"])
        for row in table
        if row["Alive"]
    ]
    return sorted(nodes, key=lambda node: (not node.is_head, node.address, node.node_id))


def monitor_candidates(nodes: Sequence[Node], own: str) -> list[Node]:
    """Choose the nodes that may run the monitor, best first: Ray's head, this one, then the others.

    Args:
        nodes: Live nodes, the head first.
        own: Id of the node that runs `eaas up`.
    """
    ranked = sorted(nodes, key=lambda node: (not node.is_head, node.node_id != own))
    # The monitor has the same port at each candidate, so two candidates never share an address.
    distinct = {node.address: node for node in reversed(ranked)}
    return [node for node in ranked if distinct[node.address] is node][:_CANDIDATES]


def least_loaded(nodes: Iterable[Node], servers: Iterable[str]) -> str | None:
    """Choose the node of another expert server: one with the fewest servers; among equals not Ray's head.

    Args:
        nodes: Live nodes.
        servers: Id of the node of each expert server.

    Returns:
        Id of the node; None if there is none.
    """
    counts = Counter(servers)
    ranked = sorted(nodes, key=lambda node: (counts[node.node_id], node.is_head))
    return ranked[0].node_id if ranked else None


def monitor_places(candidates: Iterable[Node], nodes: Sequence[Node]) -> list[str]:
    """List the ids of the live nodes that may run the monitor, best first.

    Members know the candidates' addresses. A machine on which Ray was started again has another id and the
    same address.

    Args:
        candidates: The monitor's candidates when the cluster started, best first.
        nodes: Live nodes.
    """
    by_address = {node.address: node.node_id for node in nodes}
    by_address |= {c.address: c.node_id for c in candidates if c in nodes}
    return [by_address[c.address] for c in candidates if c.address in by_address]


def actor_options(
    resources: Mapping[str, float], preferred: Sequence[str], others: Sequence[str] = ()
) -> dict[str, Any]:
    """Build the options of a Ray actor from the resources that it reserves.

    Args:
        resources: Amounts by name, as Ray's bundles have them: "CPU", "GPU", "memory" (bytes), or your own.
        preferred: Ids of preferred nodes.
        others: Ids of the nodes that take the actor if the preferred ones have no room; empty: any node.
    """
    custom = dict(resources)
    options: dict[str, Any] = {
        "num_cpus": custom.pop("CPU", 0),
        "num_gpus": custom.pop("GPU", 0),
        "memory": int(custom.pop("memory", 0)) or None,
        "resources": custom,
    }
    if preferred:
        options["label_selector"] = _one_of(preferred)
        options["fallback_strategy"] = [{"label_selector": _one_of(others) if others else {}}]
    return options


def _one_of(nodes: Sequence[str]) -> dict[str, str]:
    return {_NODE_LABEL: f"in({','.join(nodes)})"}


def refuse_open_network(nodes: Sequence[Node], has_tls: bool, insecure: bool) -> bool:
    """Check the listen policy; return whether members listen on loopback only.

    Without TLS and --insecure they do, which is possible on one node.

    Raises:
        ConfigError: There are several nodes.
    """
    if has_tls or insecure:
        return False
    if len(nodes) > 1:
        raise ConfigError(
            f"Ray has {len(nodes)} nodes, and members on them would accept connections without "
            "authentication: give --tls DIR (`eaas certs DIR` makes certificates; each node needs the "
            "directory), or --insecure if the network is yours alone"
        )
    return True
