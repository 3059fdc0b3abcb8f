"""The observed load and the settings in force: the balancer's input of `cost_benefit`. No I/O.

Thread-safe: a lock guards each call. Planning runs outside the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.live.cost_benefit import (
    STATIC_POLICY,
    Settings,
    Situation,
    lay_out,
    pinned,
)
from balancer.live.hotness import HotnessFold, Reading, Window
from balancer.live.speeds import Speedometer
from balancer.live.triggers import Triggers
from balancer.planner.layout import Holds, Layout, Shares
from balancer.planner.stages import shares_of
from balancer.policies.measure import par, peak_to_mean
from balancer.policies.types import Float
from eaas.config import BalancerConfig
from eaas.log import get_logger
from eaas.nodes import node_of
from eaas.types import Member, Placement

__all__ = ["LiveLayout", "LoadState", "Observed"]

_log = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class Observed:
    """What the servers counted in the window, for metrics and `GetHotness`.

    Attributes:
        steps: Steps with tokens.
        tokens_LE: int64; tokens in the window.
        load_LS: float64; tokens that each server counted.
        speeds_S: float64; relative speeds.
        par_L: float64; PAR of load_LS.
    """

    steps: int
    tokens_LE: npt.NDArray[np.int64]
    load_LS: Float
    speeds_S: Float
    par_L: Float


class LoadState:
    """Collects the servers' readings into a window; returns situations and triggers for plans.

    Args:
        config: The balancer's settings.
        layers, experts: L and E of the model.

    Attributes:
        expert_bytes: Bytes of a replica; 0 until a server reports it.
        counted: Number of steps with tokens so far.
    """

    def __init__(self, config: BalancerConfig, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self._lock = threading.Lock()
        self._fold = HotnessFold(layers, experts)
        self._window = Window(config.window_size)
        self._speedometer = Speedometer()
        self._measures = config.speeds == "measured"
        self._speeds: dict[str, float] = {}
        self._room: dict[str, int] = {}
        self._nodes: dict[str, str] = {}
        self.expert_bytes = 0
        self.counted = 0
        self._triggers = Triggers(config.step_interval, config.window_size)

    def position(self, server_id: str) -> tuple[int, int]:
        """Return boot id and sequence of a server's last reading, for the next request; (0, 0): none."""
        with self._lock:
            return self._fold.position(server_id)

    def stepped(
        self,
        readings: Mapping[str, Reading],
        members: Mapping[str, Member],
        placement: Placement | None,
        expert_bytes: int,
    ) -> tuple[str, str] | None:
        """Record the readings of one step, and decide whether it is time to plan.

        Args:
            readings: Readings of the servers that answered, by id.
            members: Live expert servers.
            placement: The current one.
            expert_bytes: Bytes of a replica; 0: unknown.

        Returns:
            Trigger and reason if it is time to plan.
        """
        with self._lock:
            self.expert_bytes = expert_bytes or self.expert_bytes
            self._room = {s: m.memory_bytes for s, m in members.items() if m.memory_bytes}
            self._nodes = {s: node_of(m) for s, m in members.items()}
            stated_bytes = max((m.expert_bytes for m in members.values()), default=0)
            self.expert_bytes = self.expert_bytes or stated_bytes
            counted = self._window.add(self._fold.step(readings))
            self.counted += counted
            stated = {s: m.speed for s, m in members.items()}
            names = sorted(members)
            work = {s: self._window.work(s) for s in names if self._measures}
            speeds_S = self._speedometer.read(names, work, stated)
            self._speeds = dict(zip(names, speeds_S.tolist(), strict=True))
            if not counted or placement is None:
                return None
            recent_LE = self._window.tokens_LE(self._triggers.recent).astype(np.float64)
            recent_par = self._par(placement, recent_LE)
            return self._triggers.stepped(recent_LE, recent_par, len(placement.servers))

    @property
    def recent(self) -> int:
        """Number of steps over which drift is measured, and between two steps of the control loop."""
        return self._triggers.recent

    def window_WLE(self) -> npt.NDArray[np.int64] | None:
        """Return the window's tokens by step, to measure burstiness; None: fewer than two steps."""
        with self._lock:
            return self._window.tokens_WLE() if len(self._window) > 1 else None

    def last_WLE(self, steps: int) -> npt.NDArray[np.int64] | None:
        """Return the tokens of the last steps, for spare replicas; None: there were none yet."""
        with self._lock:
            return self._window.tokens_WLE(steps) if len(self._window) else None

    def forget_the_past(self) -> None:
        """After drift: drop all but the last steps, so that the plan is for the changed load."""
        with self._lock:
            self._window.keep_last(self._triggers.recent)

    def planned(self, situation: Situation, par_L: Float) -> None:
        """Record a plan's load and the PAR it leads to: drift and the interval are counted from here."""
        with self._lock:
            self._triggers.planned(situation.load_LE, float(par_L.mean()))

    def situation(
        self,
        servers: Sequence[str],
        holds_LSE: Holds,
        shares_LSE: Shares,
        load_LE: Float | None = None,
    ) -> Situation:
        """Build the input of a plan: a layout with its servers' observed load, speeds, memory and nodes.

        Args:
            servers: The servers of the layout.
            holds_LSE, shares_LSE: Their current layout.
            load_LE: Replaces the window's load.
        """
        with self._lock:
            window_WLE = None
            if load_LE is None:
                load_LE = np.zeros((self.layers, self.experts))
                if len(self._window):
                    window_WLE = self._window.tokens_WLE()
                    load_LE = window_WLE.sum(axis=0, dtype=np.float64)
            capacity_S = None
            if self._room and self.expert_bytes:
                full = self.layers * self.experts
                limits = {s: size // self.expert_bytes for s, size in self._room.items()}
                capacity_S = np.array([min(full, limits.get(s, full)) for s in servers], np.int64)
            return Situation(
                servers=tuple(servers),
                holds_LSE=holds_LSE,
                shares_LSE=shares_LSE,
                load_LE=load_LE,
                speeds_S=np.array([self._speeds.get(s, 1.0) for s in servers]),
                capacity_S=capacity_S,
                expert_bytes=self.expert_bytes,
                window_WLE=window_WLE,
                nodes_S=np.array([self._nodes.get(s, s) for s in servers], np.str_),
            )

    def observed(self, servers: Sequence[str], last: int | None = None) -> Observed | None:
        """Return the window's or its last steps' counts, for metrics and operators; None: no tokens yet."""
        with self._lock:
            if not len(self._window):
                return None
            load_LS = self._window.load_LS(servers, last)
            speeds_S = np.array([self._speeds.get(s, 1.0) for s in servers])
            tokens_LE = self._window.tokens_LE(last)
            par_L = peak_to_mean(load_LS, speeds_S)
            steps = min(len(self._window), last or len(self._window))
            return Observed(steps, tokens_LE, load_LS, speeds_S, par_L)

    def _par(self, placement: Placement, load_LE: Float) -> float:
        """Return a load's mean PAR over a placement's live servers, computed as in plans."""
        living = [s for s, server in enumerate(placement.servers) if server in self._speeds]
        if not living:
            return 1.0
        held_LSE = placement.holds_LSE[:, living]
        shares_LSE = placement.shares_LSE[:, living].astype(np.float64)
        if len(living) < len(placement.servers):
            shares_LSE = shares_of(held_LSE, shares_LSE)
        speeds_S = np.array([self._speeds[placement.servers[s]] for s in living])
        return float(par(load_LE, held_LSE, shares_LSE, speeds_S).mean())


class LiveLayout(Layout):
    """The live planner's layouts: by the policy in force; even without a load or if it ignores load.

    Args:
        settings: The initial settings; `change` replaces them.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.redundancy)
        self.settings = settings
        self.load: LoadState | None = None

    @property
    def levels(self) -> bool:
        """Whether repair evens out uneven placements: only under the policy `spread`, without pins."""
        return self.settings.policy == STATIC_POLICY and not self.settings.pins

    @property
    def redundancy(self) -> int:
        """Servers that should hold each expert, as set by the operator; the planner's repairs follow it."""
        return self.settings.redundancy

    def change(self, **fields: Any) -> None:
        """Change fields of the settings for later layouts: by operators, the record or the control loop."""
        self.settings = replace(self.settings, **fields)

    def first(self, layers: int, experts: int, servers: tuple[str, ...]) -> tuple[Holds, Shares]:
        """Lay out the first placement: even, as no load is known, with the pins (see `Layout.first`)."""
        wished = super().first(layers, experts, servers)
        return self._pinned(servers, wished, np.zeros_like(wished[0]))

    def around(
        self, servers: tuple[str, ...], holds_LSE: Holds, shares_LSE: Shares
    ) -> tuple[Holds, Shares]:
        """Lay out around what servers hold (see `Layout.around`), by the policy if there is a load."""
        settings, load = self.settings, self.load
        if load is not None and settings.policy != STATIC_POLICY:
            situation = load.situation(servers, holds_LSE, shares_LSE)
            if situation.load_LE.any():
                try:
                    return lay_out(settings, situation)
                except ValueError as error:
                    # Every expert needs a server even if the operator's settings allow no plan.
                    _log.error(
                        "%s cannot plan this (%s): using an even placement", settings.policy, error
                    )
        return self._pinned(servers, super().around(servers, holds_LSE, shares_LSE), holds_LSE)

    def _fixed(self, servers: Sequence[str], holds_LSE: Holds) -> Holds | None:
        return pinned(self.settings, servers, holds_LSE)

    def _pinned(
        self, servers: tuple[str, ...], layout: tuple[Holds, Shares], held_LSE: Holds
    ) -> tuple[Holds, Shares]:
        if not self.settings.pins:
            return layout
        holds_LSE, shares_LSE = layout
        for layer, expert, server in self.settings.pins:
            if server in servers and not holds_LSE[layer, servers.index(server), expert]:
                holds_LSE[layer, servers.index(server), expert] = True
                holders_S = holds_LSE[layer, :, expert]
                shares_LSE[layer, :, expert] = holders_S / holders_S.sum()
        return self.apart(servers, holds_LSE, shares_LSE, held_LSE)
