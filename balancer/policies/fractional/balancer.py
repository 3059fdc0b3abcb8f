"""`fractional` with state across windows, for longer forecasts; the simulator's, not the live balancer's."""

from __future__ import annotations

from dataclasses import replace

import numpy.typing as npt

from balancer.policies.fractional.layout import checked_nodes, checked_price, lay_out_next
from balancer.policies.fractional.window import Windows
from balancer.policies.plan import make_plan
from balancer.policies.prices import EXPERT_BYTES, LINK_BYTES_PER_S
from balancer.policies.problem import checked_window, make_problem, refuse_token_ids
from balancer.policies.sparse import Layout
from balancer.policies.types import Plan

__all__ = ["FractionalBalancer"]


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
        self._windows = Windows()

    def step(self, hotness_WLE: npt.ArrayLike) -> Plan:
        """Plan the placement for the next window; the plan is the current layout of the next step.

        Args:
            hotness_WLE: (W, L, E) loads by iteration, oldest first, at least 0.

        Raises:
            ValueError: An argument is wrong, here or of the constructor; the message names it.
        """
        window_WLE = checked_window("hotness_WLE", hotness_WLE)
        refuse_token_ids("hotness_WLE", window_WLE)
        self._windows.add(window_WLE)
        problem = make_problem(
            self._windows.blocks_NLE[-self._windows.ahead :].mean(axis=0),
            self._servers,
            self._slots,
            self._current,
            self._speeds_S,
            self._apart_S,
        )
        layout, load_LE = lay_out_next(problem, self._windows, self._price, *self._nodes)
        plan = make_plan("fractional", replace(problem, load_LE=load_LE), layout, best_split=True)
        self._current = plan
        return plan
