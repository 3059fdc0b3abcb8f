"""Lays out experts over servers: by the policy in force, for plans and for the planner's repairs.

    layout    which server holds which experts, and what share of an expert's tokens each holder takes
    capacity  replicas that a server has memory for, over all layers

Shape suffixes: L layers, S servers, E logical experts, W steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import balancer.policies as policies
from balancer.planner.backups import deal, primaries, with_backups, with_least_shares
from balancer.policies.anti_affinity import Nodes, apply_anti_affinity, count_on_one_node
from balancer.policies.registry import find
from balancer.policies.repair import even_shares, repair
from balancer.policies.spread import spread
from balancer.policies.types import Float, Holds, Int
from eaas.config import BalancerConfig
from eaas.errors import ConfigError
from eaas.log import get_logger
from eaas.minmax import split

__all__ = [
    "HORIZON_S",
    "STATIC_POLICY",
    "Layout",
    "Settings",
    "Shares",
    "Situation",
    "best_shares",
    "check_node_budget",
    "lay_out",
    "slots",
]

_log = get_logger(__name__)

Shares = npt.NDArray[np.floating]

STATIC_POLICY = "spread"
"""The policy that ignores load: replicas move only when servers come or go."""
HORIZON_S = 600.0
"""Seconds of service within which moves must pay back their cost."""


@dataclass(frozen=True)
class Settings:
    """The operator's settings for placements (`BalancerConfig` and later calls).

    Attributes:
        policy: One of `balancer.policies.names()`.
        redundancy: Fewest servers that hold each expert.
        num_redundant_experts: Replicas per layer that the policy may place beyond one of each expert.
        link_bytes_per_s: Rate at which servers load experts.
        stall_s: Seconds of service that a load costs in addition to its bytes.
        knobs: The policy's own parameters, by name, as the operator set them.
        tuned: The same, as the control loop set them; `knobs` take precedence.
        node_budget: Most replicas per layer on other nodes than their expert's first one, without backups.
            None: any number.
        pins: Required replicas: (layer, expert, server).
    """

    policy: str = STATIC_POLICY
    redundancy: int = 2
    num_redundant_experts: int = 0
    link_bytes_per_s: float = 1e9
    stall_s: float = 0.0
    knobs: Mapping[str, Any] = field(default_factory=dict)
    tuned: Mapping[str, Any] = field(default_factory=dict)
    node_budget: int | None = None
    pins: frozenset[tuple[int, int, str]] = frozenset()

    @classmethod
    def of(cls, config: BalancerConfig) -> Settings:
        """Return the settings at start. Raises ConfigError: no such policy, or it knows no node budget."""
        try:
            find(config.policy)
            if config.node_budget >= 0:
                check_node_budget(config.policy)
        except ValueError as error:
            raise ConfigError(f"balancer.policy: {error}") from error
        if config.node_budget >= 0 and config.spare_slots:
            raise ConfigError(
                "balancer.spare_slots ignores nodes: set it to false, or balancer.node_budget to -1"
            )
        return cls(
            policy=config.policy,
            redundancy=config.redundancy,
            num_redundant_experts=config.num_redundant_experts,
            link_bytes_per_s=config.link_bytes_per_s,
            node_budget=None if config.node_budget < 0 else config.node_budget,
        )


@dataclass(frozen=True, eq=False)
class Situation:
    """The input of a plan, observed or hypothetical: servers, what they hold, their load, speed and memory.

    Attributes:
        servers: The servers of the layout.
        holds_LSE: bool; experts that they hold now. A new server holds nothing.
        shares_LSE: float; shares of the current placement.
        load_LE: float64; tokens of each expert in the window.
        speeds_S: float64, above 0.
        capacity_S: int64; replicas over all layers. None: no limits.
        expert_bytes: Bytes of a replica.
        window_WLE: Tokens by step, for policies that need more than the sum; None: no window.
        nodes_S: Names or numbers of the servers' nodes (`Nodes.of`). None: unknown.
        away_LE: int64; replicas on dead servers that may come back. None: no such servers.
    """

    servers: tuple[str, ...]
    holds_LSE: Holds
    shares_LSE: npt.NDArray[np.floating]
    load_LE: Float
    speeds_S: Float
    capacity_S: Int | None = None
    expert_bytes: int = 0
    window_WLE: npt.NDArray[np.int64] | None = None
    nodes_S: npt.NDArray[Any] | None = None
    away_LE: Int | None = None

    @property
    def nodes(self) -> Nodes | None:
        """The servers' nodes; None: unknown."""
        return None if self.nodes_S is None else Nodes.of(self.nodes_S.tolist())


class Layout:
    """The planner's layouts, when servers join or leave: by the policy in force, or evenly without a load.

    Args:
        settings: The initial settings; `change` replaces them.
        observe: Returns the situation of a layout's servers, with the observed load; None: it is not known.
    """

    def __init__(
        self,
        settings: Settings,
        observe: Callable[[Sequence[str], Holds, Shares], Situation] | None = None,
    ) -> None:
        self.settings = settings
        self._observe = observe
        self._nodes: Mapping[str, str] = {}

    def change(self, **fields: Any) -> None:
        """Change fields of the settings for later layouts: by operators, the record or the control loop."""
        self.settings = replace(self.settings, **fields)

    @property
    def redundancy(self) -> int:
        """Servers that should hold each expert; all of them if there are fewer."""
        return self.settings.redundancy

    @property
    def levels(self) -> bool:
        """Whether the planner's repair evens out an uneven placement that nobody requested."""
        return self.settings.policy == STATIC_POLICY and not self.settings.pins

    def know(self, nodes: Mapping[str, str]) -> None:
        """Record the nodes of servers by id, for later layouts: an expert's replicas do not share one."""
        self._nodes = nodes

    def first(self, layers: int, experts: int, servers: tuple[str, ...]) -> tuple[Holds, Shares]:
        """Lay out experts evenly on servers that hold nothing: holds and shares, bool and float (L, S, E)."""
        holds_LSE, shares_LSE = spread(layers, experts, len(servers), self.redundancy)
        return self._with_pins(servers, holds_LSE, shares_LSE, np.zeros_like(holds_LSE))

    def around(
        self, servers: tuple[str, ...], holds_LSE: Holds, shares_LSE: Shares
    ) -> tuple[Holds, Shares]:
        """Lay out experts around what these servers hold: by the policy if there is a load, else evenly.

        Args:
            servers: The servers of the new layout.
            holds_LSE: bool (L, S, E); what they hold. New ones hold nothing.
            shares_LSE: float (L, S, E); 0 if unknown. All 0 for an expert whose servers are lost.
        """
        settings = self.settings
        if self._observe is not None and settings.policy != STATIC_POLICY:
            situation = self._observe(servers, holds_LSE, shares_LSE)
            if situation.load_LE.any():
                try:
                    return lay_out(settings, situation)
                except ValueError as error:
                    # Every expert needs a server even if the operator's settings allow no plan.
                    _log.error(
                        "%s cannot plan this (%s): using an even placement", settings.policy, error
                    )
        even_LSE = repair(holds_LSE, self.redundancy)
        return self._with_pins(servers, even_LSE, even_shares(even_LSE), holds_LSE)

    def with_anti_affinity(
        self, servers: Sequence[str], holds_LSE: Holds, shares_LSE: Shares, held_LSE: Holds
    ) -> tuple[Holds, Shares]:
        """Move an expert's replicas to different nodes; every server keeps its number of replicas.

        Args:
            servers: Index S.
            holds_LSE, shares_LSE: The layout.
            held_LSE: What the servers hold now, to load as little as possible.
        """
        then_LSE, then_shares = np.array(holds_LSE), np.array(shares_LSE, np.float64)
        apply_anti_affinity(
            *(then_LSE, then_shares, self._nodes_of(servers)),
            current_LSE=held_LSE if held_LSE.any() else None,
            fixed_LSE=_pins_LSE(self.settings, servers, holds_LSE) & holds_LSE,
            spread_over=self.redundancy,
        )
        return then_LSE, then_shares

    def lacks_anti_affinity(
        self, servers: Sequence[str], holds_LSE: Holds, shares_LSE: Shares
    ) -> bool:
        """Whether a layout has more experts with all replicas on one node than it need have."""
        nodes = self._nodes_of(servers)
        if nodes.count < 2 or not (found := count_on_one_node(holds_LSE, nodes, replicas=2)):
            return False
        then_LSE, _ = self.with_anti_affinity(servers, holds_LSE, shares_LSE, holds_LSE)
        return count_on_one_node(then_LSE, nodes, replicas=2) < found

    def _nodes_of(self, servers: Sequence[str]) -> Nodes:
        """Return the nodes of servers; an unknown server has its own."""
        return Nodes.of([self._nodes.get(s, s) for s in servers])

    def _with_pins(
        self, servers: tuple[str, ...], holds_LSE: Holds, shares_LSE: Shares, held_LSE: Holds
    ) -> tuple[Holds, Shares]:
        """Add the pinned replicas to an even layout, then put replicas on different nodes."""
        pins_LSE = _pins_LSE(self.settings, servers, holds_LSE)
        new_LE = np.any(pins_LSE & ~holds_LSE, axis=1, keepdims=True)
        holds_LSE = holds_LSE | pins_LSE
        shares_LSE = np.where(new_LE, even_shares(holds_LSE), shares_LSE)
        return self.with_anti_affinity(servers, holds_LSE, shares_LSE, held_LSE)


def lay_out(settings: Settings, now: Situation) -> tuple[Holds, Float]:
    """Compute the policy's layout, with backups and pins, for plans and for the planner's repairs.

    Replicas of an expert go to different nodes; within a node budget only backups do.

    Raises:
        ValueError: There is not enough capacity, or a knob is wrong; the message says which.
    """
    cap_LS, slots_LS = slots(settings, now)
    kept_LSE = primaries(now.holds_LSE, now.shares_LSE)
    load_LE = now.load_LE if now.load_LE.any() else np.ones_like(now.load_LE)
    plan = policies.plan(
        settings.policy,
        load_LE,
        len(now.servers),
        slots_LS,
        current=kept_LSE if now.holds_LSE.any() else None,
        speeds_S=now.speeds_S,
        **_knobs(settings, now),
    )
    pins_LSE = _pins_LSE(settings, now.servers, plan.holds_LSE)
    primary_LSE = plan.holds_LSE | pins_LSE
    # The policy's own shares are replaced because they are equal or for a forecast. Clients can follow any
    # shares, and the next evaluation would ask for those that are best for the window.
    shares_LSE = best_shares(load_LE, primary_LSE, now.speeds_S)
    nodes = now.nodes if now.nodes is not None and now.nodes.count > 1 else None
    holds_LSE = with_backups(
        *(primary_LSE, now.holds_LSE, settings.redundancy, cap_LS, now.away_LE),
        nodes_S=None if nodes is None else nodes.node_S,
    )
    shares_LSE = with_least_shares(primary_LSE, holds_LSE, shares_LSE)
    if nodes is None:
        return holds_LSE, shares_LSE
    risen_L = apply_anti_affinity(
        *(holds_LSE, shares_LSE, nodes),
        load_LE=load_LE,
        speeds_S=now.speeds_S,
        current_LSE=now.holds_LSE if now.holds_LSE.any() else None,
        fixed_LSE=pins_LSE if settings.node_budget is None else primary_LSE,
        spread_over=settings.redundancy,
    )
    if risen_L:
        primary_LSE = primaries(holds_LSE[risen_L], shares_LSE[risen_L])
        best_LSE = best_shares(load_LE[risen_L], primary_LSE, now.speeds_S)
        shares_LSE[risen_L] = with_least_shares(primary_LSE, holds_LSE[risen_L], best_LSE)
    return holds_LSE, shares_LSE


def best_shares(load_LE: Float, holds_LSE: Holds, speeds_S: Float) -> Float:
    """float64 (L, S, E): shares with the lowest PAR for these holds; even for experts without load."""
    replicas_LE = np.maximum(holds_LSE.sum(axis=1, keepdims=True), 1)
    even_LSE = holds_LSE / replicas_LE
    return np.stack(
        [
            split(load_E, even_SE, speeds_S)
            for load_E, even_SE in zip(load_LE, even_LSE, strict=True)
        ]
    )


def slots(settings: Settings, now: Situation) -> tuple[Int, Int]:
    """int64 (L, S) twice: each server's slots by its memory, and those of them that the policy may fill."""
    layers, servers, experts = now.holds_LSE.shape
    capacity_S = np.full(servers, layers * experts) if now.capacity_S is None else now.capacity_S
    # The remainder goes to the layers in turn, and within each layer to the servers in turn.
    turns_L = np.arange(layers)
    cap_LS = capacity_S // layers + (turns_L[:, None] < capacity_S % layers)
    cap_LS = np.minimum(cap_LS, experts).astype(np.int64)
    total = experts + settings.num_redundant_experts
    slots_LS = np.empty_like(cap_LS)
    for layer in range(layers):
        turn = layer * (total % servers)
        slots_LS[layer] = np.roll(deal(total, np.roll(cap_LS[layer], -turn)), turn)
    return cap_LS, slots_LS


def _knobs(settings: Settings, now: Situation) -> dict[str, Any]:
    """Return the policy's knobs: by the cluster (such as window and nodes), tuned, or an operator's."""
    parameters = inspect.signature(find(settings.policy)).parameters
    known = {
        "window_WLE": now.window_WLE,
        "expert_bytes": now.expert_bytes,
        "link_bytes_per_s": settings.link_bytes_per_s,
        "stall_s": settings.stall_s,
        "horizon_s": HORIZON_S,
        **settings.tuned,
    }
    if settings.node_budget is not None:
        check_node_budget(settings.policy)
        nodes_S = None if now.nodes is None else now.nodes.node_S
        known |= {"nodes_S": nodes_S, "cross_node_replicas": settings.node_budget}
    given = {name: value for name, value in known.items() if name in parameters}
    if settings.node_budget is None:
        given["nodes_S"] = now.nodes_S
    return given | dict(settings.knobs)


def check_node_budget(policy: str) -> None:
    """Raise ValueError for a policy that does not support a node budget, at start and in `SetPolicy`."""
    if "nodes_S" not in inspect.signature(find(policy)).parameters:
        raise ValueError(
            f"balancer.node_budget is set, and {policy} knows no nodes: give {policies.DEFAULT_POLICY}"
        )


def _pins_LSE(settings: Settings, servers: Sequence[str], like_LSE: Holds) -> Holds:
    """bool (L, S, E), the shape of `like_LSE`: the pinned replicas on these servers."""
    pins_LSE = np.zeros_like(like_LSE)
    for layer, expert, server in settings.pins:
        if server in servers:
            pins_LSE[layer, servers.index(server), expert] = True
    return pins_LSE
