"""In the balancer: relative speeds of expert servers, fitted to their work and busy time. No I/O.

Each batch, each visited expert and each token costs time, which differs between servers only by the server's
speed. Costs and speeds are fitted over all servers. Plain tokens per second would rate a server as slow
because it has little work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from balancer.live.hotness import Work

__all__ = ["Speedometer"]

Float = npt.NDArray[np.float64]

_ROUNDS = 30
# A server with less busy time has no measured speed, because a few disturbed batches could dominate it.
_LEAST_BUSY_S = 1.0
# Relative differences below this are noise of the machine or the fit; the speed in use stays.
_BAND = 0.3
_SLOWEST, _FASTEST = 0.05, 20.0


class Speedometer:
    """Measures servers' speeds for plans, and changes them only beyond noise."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def read(
        self,
        servers: Sequence[str],
        work: Mapping[str, Sequence[Work]],
        stated: Mapping[str, float],
    ) -> Float:
        """Update and return the relative speeds for later plans: float64 (S), above 0. Called once per step.

        Args:
            servers: Index S.
            work: Each server's work, step by step.
            stated: Configured speeds; used without a measurement, and if a measurement agrees within noise.
        """
        # A short disturbance must not change a speed, so both halves of the time must agree.
        halves = [
            fitted_speeds(part, stated)
            for part in (
                {s: work[s][: len(work[s]) // 2] for s in servers if s in work},
                {s: work[s][len(work[s]) // 2 :] for s in servers if s in work},
            )
        ]
        for server in servers:
            used = self._used.get(server, stated[server])
            measured = [half[server] for half in halves if server in half]
            if len(measured) == 2 and _agree(measured, used):
                near = not _agree(measured, stated[server])
                used = stated[server] if near else round(math.sqrt(math.prod(measured)), 2)
            self._used[server] = used
        self._used = {s: self._used[s] for s in servers}
        return np.array([self._used[s] for s in servers])


def fitted_speeds(
    work: Mapping[str, Sequence[Work]], stated: Mapping[str, float]
) -> dict[str, float]:
    """Fit the speeds of servers with enough work, in the unit of `stated`; empty for fewer than two."""
    total = {s: Work(*map(sum, zip(*steps, strict=True))) for s, steps in work.items()}
    known = [s for s, w in total.items() if w.busy_s >= _LEAST_BUSY_S and w.tokens]
    if len(known) < 2:
        return {}
    rows = [(s, w) for s in known for w in work[s] if w.busy_s > 0 and w.tokens]
    owner_N = np.array([known.index(s) for s, _ in rows])
    a_N3 = np.array([[w.batches, w.visits, w.tokens] for _, w in rows])
    b_N = np.array([w.busy_s for _, w in rows])
    busy_S = np.array([total[s].busy_s for s in known])
    stated_S = np.array([stated[s] for s in known])
    speed_S = stated_S.copy()
    for _ in range(_ROUNDS):
        # Step 1: costs of batch, visit and token, given these speeds.
        # Errors are relative to the time: a disturbance slows a server by a factor.
        time_N = b_N * speed_S[owner_N]
        cost_3 = _least_squares(a_N3 / time_N[:, None], np.ones_like(time_N))
        # Step 2: speeds, given these costs, over all steps of a server.
        wanted_S = np.bincount(owner_N, a_N3 @ cost_3, len(known))
        speed_S = np.clip(wanted_S / busy_S, _SLOWEST, _FASTEST)
        # Step 3: fix the free common factor of costs and speeds: the median server has its stated speed.
        speed_S /= np.median(speed_S / stated_S)
    return {s: float(speed) for s, speed in zip(known, speed_S, strict=True)}


def _agree(measured: Sequence[float], used: float) -> bool:
    """Whether all measured speeds are clearly above the speed in use, or all clearly below: it may change."""
    return all(t > used * (1 + _BAND) for t in measured) or all(
        t * (1 + _BAND) < used for t in measured
    )


def _least_squares(a_N3: Float, b_N: Float) -> Float:
    """Solve non-negative least squares, for the costs of batch, visit and token: try all subsets of them."""
    best_3, least = np.zeros(a_N3.shape[1]), float(b_N @ b_N)
    for count in range(1, len(best_3) + 1):
        for used in combinations(range(len(best_3)), count):
            a_NU = a_N3[:, used]
            x_U = np.linalg.lstsq(a_NU, b_N, rcond=None)[0]
            rest_N = a_NU @ x_U - b_N
            if (x_U >= 0).all() and rest_N @ rest_N < least:
                best_3, least = np.zeros_like(best_3), float(rest_N @ rest_N)
                best_3[list(used)] = x_U
    return best_3
