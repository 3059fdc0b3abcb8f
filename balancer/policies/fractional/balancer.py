"""`fractional` with state across windows, for longer forecasts; the simulator's, not the live balancer's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from balancer.policies.fractional.forecast import forecast, scenarios
from balancer.policies.fractional.layout import (
    checked_nodes,
    checked_price,
    is_large,
    lay_out_window,
    scenario_count,
)
from balancer.policies.fractional.together import anew_factor, noise, returns
from balancer.policies.fractional.window import History, window_means
from balancer.policies.plan import make_plan
from balancer.policies.prices import EXPERT_BYTES, LINK_BYTES_PER_S
from balancer.policies.problem import checked_window, make_problem, refuse_token_ids
from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Plan

__all__ = ["FractionalBalancer"]

_WINDOWS_KEPT = 3
_WINDOWS_OF_MEANS = 5


class FractionalBalancer:
    """Maintains a `fractional` placement over windows, for the simulator: `step(hotness_WLE) -> Plan`.

    The knobs are those of `fractional`. A plan's PAR is that of the forecast loads under its shares; clients
    that split each batch have a lower one.

    Args:
        servers: S.
        slots: Replicas per layer, or (S,), or (L, S), as for `plan`.
        current: The layout before the first step, as for `plan`.
    """

    def __init__(
        self,
        servers: int,
        slots: int | npt.ArrayLike,
        *,
        current: Plan | Layout | npt.ArrayLike | None = None,
        speeds_S: npt.ArrayLike | None = None,
        expert_bytes: float = EXPERT_BYTES,
        link_bytes_per_s: float = LINK_BYTES_PER_S,
        stall_s: float = 0.0,
        horizon_s: float = 60.0,
        least_gain: float = 0.002,
        nodes_S: npt.ArrayLike | None = None,
        cross_node_replicas: int | None = None,
    ) -> None:
        self._servers, self._slots, self._speeds_S = servers, slots, speeds_S
        self._current = current
        self._price = checked_price(expert_bytes, link_bytes_per_s, stall_s, horizon_s, least_gain)
        self._nodes = checked_nodes(nodes_S, cross_node_replicas, servers)
        # With a limit, replicas share nodes; without one they go to different nodes.
        self._apart_S = nodes_S if cross_node_replicas is None else None
        self._blocks_NLE: Float | None = None
        self._span: tuple[int, ...] = ()
        # Of the last windows: means over a few iterations, and the noise of an iteration.
        self._means = History(_WINDOWS_OF_MEANS)
        self._noise: list[Float] = []

    def step(self, hotness_WLE: npt.ArrayLike) -> Plan:
        """Plan the placement for the next window; the plan is the current layout of the next step.

        Args:
            hotness_WLE: (W, L, E) loads by iteration, oldest first, at least 0.

        Raises:
            ValueError: An argument is wrong, here or of the constructor; the message names it.
        """
        window_WLE = checked_window("hotness_WLE", hotness_WLE)
        refuse_token_ids("hotness_WLE", window_WLE)
        means_LTE, blocks_NLE = window_means(window_WLE)
        known_NLE = blocks_NLE
        if self._blocks_NLE is not None and self._span == window_WLE.shape:
            # Only blocks of the same length continue the series.
            known_NLE = np.concatenate([self._blocks_NLE, blocks_NLE])
        else:
            self._means, self._noise = History(_WINDOWS_OF_MEANS), []
        self._means.add(means_LTE)
        self._noise = [*self._noise, noise(window_WLE)][-_WINDOWS_KEPT:]
        together_L = returns(
            known_NLE, np.mean(self._noise, axis=0), len(window_WLE) / len(blocks_NLE)
        )
        problem = make_problem(
            blocks_NLE.mean(axis=0),
            self._servers,
            self._slots,
            self._current,
            self._speeds_S,
            self._apart_S,
        )
        if self._nodes[0] is not None or is_large(int(problem.slots_LS.sum())):
            together_L[:] = False
        load_LE = np.empty(window_WLE.shape[1:])
        load_LTE = self._means.joined() if together_L.any() else None
        if load_LTE is not None:
            load_LE[together_L] = load_LTE.mean(axis=1, dtype=np.float64)[together_L]
        rest = np.flatnonzero(~together_L)
        parts = scenario_count(int(problem.slots_LS.sum()))
        load_BLE = np.empty((parts, 0, window_WLE.shape[2]))
        if len(rest):
            rest_WLE = window_WLE if len(rest) == len(together_L) else window_WLE[:, rest]
            said_BLE = forecast(known_NLE[:, rest], len(blocks_NLE), parts)
            load_LE[rest] = said_BLE.mean(axis=0)
            load_BLE = scenarios(rest_WLE, blocks_NLE[:, rest], said_BLE)
        problem = replace(problem, load_LE=load_LE)
        layout = lay_out_window(
            *(problem, together_L, load_LTE, load_BLE, self._price),
            *self._nodes,
            anew=anew_factor(len(window_WLE)),
        )
        plan = make_plan("fractional", problem, layout, best_split=True)
        self._span = window_WLE.shape
        self._blocks_NLE = known_NLE[-_WINDOWS_KEPT * len(blocks_NLE) :]
        self._current = plan
        return plan
