"""The observed load of the expert servers: input of plans, metrics and operators' questions. No I/O.

Thread-safe: a lock guards each call. Planning runs outside the lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.live.hotness import HotnessFold, Reading, Step
from balancer.live.speeds import Speedometer
from balancer.live.triggers import Triggers
from balancer.planner.layout import Situation
from balancer.planner.stages import shares_of
from balancer.policies.measure import par, peak_to_mean
from balancer.policies.types import Float, Holds
from eaas.config import BalancerConfig
from eaas.nodes import node_of
from eaas.types import Member, Placement

__all__ = ["LoadState", "Observed"]


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

    The window has the last steps that had tokens, oldest first.

    Args:
        config: The balancer's settings.

    Attributes:
        expert_bytes: Bytes of a replica; 0 until a server reports it.
        counted: Number of steps with tokens so far.
    """

    def __init__(self, config: BalancerConfig) -> None:
        self._lock = threading.Lock()
        self._fold = HotnessFold()
        self._window: deque[Step] = deque(maxlen=config.window_size)
        self._speedometer = Speedometer()
        self._measures = config.speeds == "measured"
        self._speeds: dict[str, float] = {}
        self._memory: dict[str, int] = {}
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
        placement: Placement,
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
            stated_bytes = max((m.expert_bytes for m in members.values()), default=0)
            self.expert_bytes = expert_bytes or self.expert_bytes or stated_bytes
            self._memory = {s: m.memory_bytes for s, m in members.items() if m.memory_bytes}
            self._nodes = {s: node_of(m) for s, m in members.items()}
            layers, _, experts = placement.shape
            step = self._fold.step(readings, (layers, experts))
            has_tokens = bool(step.tokens_LE.any())
            if has_tokens:
                self._window.append(step)
                self.counted += 1
            stated = {s: m.speed for s, m in members.items()}
            names = sorted(members)
            work = {
                s: [step.work[s] for step in self._window if s in step.work]
                for s in names
                if self._measures
            }
            speeds_S = self._speedometer.read(names, work, stated)
            self._speeds = dict(zip(names, speeds_S.tolist(), strict=True))
            if not has_tokens:
                return None
            recent_LE = self._tokens_WLE(self._triggers.recent).sum(axis=0, dtype=np.float64)
            recent_par = self._par(placement, recent_LE)
            return self._triggers.stepped(recent_LE, recent_par, len(placement.servers))

    @property
    def recent(self) -> int:
        """Number of steps over which drift is measured, and between two steps of the control loop."""
        return self._triggers.recent

    def tokens_WLE(self, last: int | None = None) -> npt.NDArray[np.int64] | None:
        """Return the tokens of the last steps, or of the whole window, by step; None: there were none yet."""
        with self._lock:
            return self._tokens_WLE(last) if self._window else None

    def forget_the_past(self) -> None:
        """After drift: drop all but the last steps, so that the plan is for the changed load."""
        with self._lock:
            recent = tuple(self._window)[-self._triggers.recent :]
            self._window.clear()
            self._window.extend(recent)

    def planned(self, situation: Situation, par_L: Float) -> None:
        """Record a plan's load and the PAR it leads to: drift and the interval are counted from here."""
        with self._lock:
            self._triggers.planned(situation.load_LE, float(par_L.mean()))

    def situation(
        self,
        servers: Sequence[str],
        holds_LSE: Holds,
        shares_LSE: npt.NDArray[np.floating],
        load_LE: Float | None = None,
    ) -> Situation:
        """Build the input of a plan: a layout with its servers' observed load, speeds, memory and nodes.

        Args:
            servers: The servers of the layout.
            holds_LSE, shares_LSE: Their current layout.
            load_LE: Replaces the window's load.
        """
        with self._lock:
            layers, _, experts = holds_LSE.shape
            window_WLE = None
            if load_LE is None:
                load_LE = np.zeros((layers, experts))
                if self._window:
                    window_WLE = self._tokens_WLE()
                    load_LE = window_WLE.sum(axis=0, dtype=np.float64)
            capacity_S = None
            if self._memory and self.expert_bytes:
                full = layers * experts
                limits = {s: size // self.expert_bytes for s, size in self._memory.items()}
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

    def observed(self, servers: Sequence[str]) -> Observed | None:
        """Return the window's counts for metrics and operators; None: no tokens yet."""
        with self._lock:
            if not self._window:
                return None
            tokens_LE = self._tokens_WLE().sum(axis=0)
            none_L = np.zeros(len(tokens_LE), np.int64)
            load_SWL = [[step.load_L.get(s, none_L) for step in self._window] for s in servers]
            load_LS = np.array(load_SWL, np.float64).sum(axis=1).T
            speeds_S = np.array([self._speeds.get(s, 1.0) for s in servers])
            par_L = peak_to_mean(load_LS, speeds_S)
            return Observed(len(self._window), tokens_LE, load_LS, speeds_S, par_L)

    def _tokens_WLE(self, last: int | None = None) -> npt.NDArray[np.int64]:
        return np.stack([step.tokens_LE for step in tuple(self._window)[-(last or 0) :]])

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
