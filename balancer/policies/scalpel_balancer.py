"""ScalpeLB with state across cycles, for the simulator, and its competition entry point, `rebalance`."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from functools import partial

import numpy as np
import numpy.typing as npt

from balancer.policies.measure import peak_to_mean
from balancer.policies.plan import make_plan
from balancer.policies.problem import (
    array,
    checked_number,
    checked_window,
    make_problem,
    refuse_token_ids,
)
from balancer.policies.scalpel import Matching, check_knobs, scalpel
from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Int, Plan

__all__ = ["ScalpelBalancer", "rebalance"]

_LOG = logging.getLogger(__name__)


class ScalpelBalancer:
    """Maintains a ScalpeLB placement over cycles, for the simulator: `step(hotness_WLE) -> Plan`.

    The knobs are those of `scalpel`.

    Args:
        servers: S.
        slots: Replicas per layer, or (S,), or (L, S), as for `plan`.
        current: The layout before the first step, as for `plan`; the first placement stays close to it.
    """

    def __init__(
        self,
        servers: int,
        slots: int | npt.ArrayLike,
        *,
        current: Plan | Layout | npt.ArrayLike | None = None,
        k: float | None = None,
        shift_tv: float = 0.2,
        budget: int = 8,
        drift_tol: float = 0.2,
        heavy_frac: float = 0.5,
        matching: Matching = "greedy",
        speeds_S: npt.ArrayLike | None = None,
        nodes_S: npt.ArrayLike | None = None,
    ) -> None:
        check_knobs(k, shift_tv, budget, drift_tol, heavy_frac, matching)
        self._servers, self._slots, self._speeds_S = servers, slots, speeds_S
        self._nodes_S = nodes_S
        self._cycle = partial(
            scalpel,
            k=k,
            shift_tv=shift_tv,
            budget=budget,
            drift_tol=drift_tol,
            heavy_frac=heavy_frac,
            matching=matching,
        )
        self._current = current
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan | None:
        """The last cycle's plan, which the next cycle maintains; None before the first."""
        return self._plan

    def step(self, hotness_WLE: npt.ArrayLike) -> Plan:
        """Plan one cycle; the plan is the current layout of the next cycle.

        Args:
            hotness_WLE: (W, L, E) loads by step, oldest first, at least 0.

        Raises:
            ValueError: An argument is wrong, here or of the constructor; the message names it.
        """
        window_WLE = checked_window("hotness_WLE", hotness_WLE)
        refuse_token_ids("hotness_WLE", window_WLE)
        problem = make_problem(
            window_WLE.sum(axis=0, dtype=np.float64),
            self._servers,
            self._slots,
            current=self._current if self._plan is None else self._plan,
            speeds_S=self._speeds_S,
            nodes_S=self._nodes_S,
        )
        layout = self._cycle(problem, window_WLE=window_WLE, anew=self._plan is None)
        self._plan = make_plan("scalpel", problem, layout)
        return self._plan


class _Tables:
    """A ScalpelBalancer with its table of slots, in which an expert that stays on a device keeps its slot."""

    def __init__(self, servers: int, slots: int) -> None:
        self.balancer = ScalpelBalancer(servers, slots)
        self.table_LSP: Int | None = None

    def step(self, hotness_WLE: npt.ArrayLike) -> Int:
        """Plan one cycle and update the table; return the changed layers, the highest gain first (int64)."""
        before, old_LSP = self.balancer.plan, self.table_LSP
        plan = self.balancer.step(hotness_WLE)
        holds_LSE = plan.holds_LSE
        if before is None or old_LSP is None:
            # The experts held, device by device; all devices hold the same number.
            expert = holds_LSE.nonzero()[2]
            self.table_LSP = expert.reshape(*holds_LSE.shape[:2], -1)
            return np.arange(len(holds_LSE))
        stays_LSP = np.take_along_axis(holds_LSE, old_LSP, 2)
        self.table_LSP = old_LSP.copy()
        self.table_LSP[~stays_LSP] = (holds_LSE & ~before.holds_LSE).nonzero()[2]
        changed_L = np.flatnonzero(~stays_LSP.all(axis=(1, 2)))
        gain_L = _par_of(before, plan) - plan.par_L
        order: Int = changed_L[np.argsort(-gain_L[changed_L], kind="stable")]
        return order


_STATE: dict[tuple[int, int, int, int], _Tables] = {}


def rebalance(
    hotness: npt.ArrayLike,
    n_device: int,
    n_red_expert: int,
    *,
    state: MutableMapping[tuple[int, int, int, int], _Tables] | None = None,
) -> tuple[bool, Int, Int, Plan | None]:
    """Plan one cycle: ScalpeLB's entry point in the competition, which keeps its placement between calls.

    Args:
        hotness: (W, L, E) loads by step, oldest first; an array, or a torch tensor.
        n_device: S.
        n_red_expert: Replicas per layer beyond the experts; the sum is a multiple of n_device.
        state: State by shape; by default one per process. An empty mapping starts anew.

    Returns:
        success: False if the hotness has negative, NaN or infinite numbers: the placement is then the last
            one, or a round-robin one if there is none.
        layer_indices: int64: layers whose placement changed, the highest gain in PAR first.
        placement: int64 (L, S, P): the expert in each slot. An expert that stays on a device stays
            in its slot.
        plan: The plan behind it; None with the round-robin placement.

    Raises:
        ValueError: Numbers or shapes are wrong; the message names the argument.
    """
    window_WLE = array("hotness", hotness)
    shape = window_WLE.shape
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"hotness has shape {shape}, wanted window x layers x experts, none 0")
    refuse_token_ids("hotness", window_WLE)
    _, layers, experts = shape
    checked_number("n_device", n_device, least=1, whole=True)
    checked_number("n_red_expert", n_red_expert, whole=True)
    slots = experts + n_red_expert
    if slots % n_device or slots > experts * n_device:
        raise ValueError(
            f"n_red_expert is {n_red_expert}: {experts} + that must be a multiple of {n_device} "
            f"devices, of {experts} per device at most"
        )
    remembered = _STATE if state is None else state
    key = (n_device, n_red_expert, layers, experts)
    tables = remembered.setdefault(key, _Tables(n_device, slots))
    try:
        changed_L = tables.step(window_WLE)
    except ValueError as error:
        _LOG.warning("cycle without a new placement: %s", error)
        last_LSP = tables.table_LSP
        if last_LSP is None:
            last_LSP = np.tile(np.arange(slots) % experts, (layers, 1)).reshape(
                layers, n_device, -1
            )
        return False, np.empty(0, dtype=np.int64), last_LSP, tables.balancer.plan
    assert tables.table_LSP is not None
    return True, changed_L, tables.table_LSP, tables.balancer.plan


def _par_of(before: Plan, now: Plan) -> Float:
    """Compute the PAR of the earlier plan's layout under the current loads, to rank layers by their gain."""
    return peak_to_mean(before.layout.server_load(now.problem.load_LE), now.problem.speeds_S)
