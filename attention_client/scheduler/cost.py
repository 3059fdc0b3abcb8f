"""What a batch costs, as far as the experts' loads decide it. A strategy minimises it, a simulator takes it
as the time.

Letters: W requests of the window, E logical experts, S expert servers, R replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attention_client.scheduler.strategies import _select
from eaas.errors import ConfigError

__all__ = ["CostModel", "ImbalanceCost", "ServerCost"]

Loads = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class CostModel(Protocol):
    """The time of a batch whose requests load the experts with so many tokens."""

    def batch_s(self, load_E: Loads) -> float:
        """The predicted time, in seconds, of a batch with that load in all."""

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """Fill `chosen` beyond its first `have` indices, one by one, with what makes the batch cheapest.

        Args:
            window_WE: The requests' loads, contiguous, oldest first.
            start_E: Load that runs with them already, or None.
            chosen: int64; its first `have` are given.
            have: How many.

        Returns:
            The predicted time of the batch with what runs already, in seconds.
        """

    def imbalance(self, load_E: Loads) -> float:
        """How much longer the slowest part takes than if all were even; 1 at best."""


@dataclass(frozen=True)
class ImbalanceCost:
    """base_s x (1 + sensitivity x CV of the experts' loads): the execution model of CAPS.

    The more evenly the experts are loaded, the faster; so what `choose` adds is complementary.

    Attributes:
        base_s: Of a batch that is in balance, in seconds.
        sensitivity: What a coefficient of variation of 1 adds.
    """

    base_s: float
    sensitivity: float

    def batch_s(self, load_E: Loads) -> float:
        """See `CostModel`."""
        return self.base_s * self.imbalance(load_E)

    def imbalance(self, load_E: Loads) -> float:
        """See `CostModel`: 1 + sensitivity x CV."""
        return self._factor(len(load_E), float(np.add.reduce(load_E)), float(load_E @ load_E))

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """See `CostModel`: least variance."""
        requests, experts = window_WE.shape
        total, squares = _select.greedy(
            window_WE, requests, experts, start_E, chosen, have, len(chosen), 1.0, 0.0, 1.0, None, 0
        )
        return self.base_s * self._factor(experts, total, squares)

    def _factor(self, experts: int, total: float, squares: float) -> float:
        if total <= 0:
            return 1.0
        return 1 + self.sensitivity * math.sqrt(max(experts * squares / total**2 - 1, 0))


class ServerCost:
    """The time of decode steps on expert servers, through a placement.

    In a step each request has one token, and its load spread over `steps` of them. A step of a layer takes

        fixed_s + max over servers of max(load_s x active experts, pair_s x pairs)

    where a server reads the weights of each expert that has a token (load_s), and computes each pair of a
    token and an expert (pair_s). Experts with tokens are counted as expected (Poisson), replicas take their
    share. Which of the two is larger decides what pays: where weights bound it, similar requests (they
    share experts); where pairs do, complementary ones.

    Args:
        shares_SE: The placement of a layer: the share of each expert's tokens that each server takes; over
            S sums to 1.
        fixed_s: Seconds of a step whatever the load.
        load_s: Seconds per active expert of a server.
        pair_s: Seconds per pair of a server.
        steps: Tokens that a request's load is of.

    Raises:
        ConfigError: A number is negative, or an expert's shares do not sum to 1.
    """

    def __init__(
        self, shares_SE: Loads, *, fixed_s: float, load_s: float, pair_s: float, steps: int
    ) -> None:
        if min(fixed_s, load_s, pair_s) < 0 or steps < 1:
            raise ConfigError(
                f"cost model: fixed_s {fixed_s}, load_s {load_s}, pair_s {pair_s}, steps {steps}: "
                "none may be negative, and there is at least one step"
            )
        if shares_SE.ndim != 2 or not np.allclose(shares_SE.sum(axis=0), 1, atol=1e-4):
            raise ConfigError(
                "cost model: the shares of each expert over the servers must sum to 1"
            )
        self.shares_SE = np.asarray(shares_SE, dtype=np.float64)
        self.fixed_s, self.load_s, self.pair_s, self.steps = fixed_s, load_s, pair_s, steps
        server_R, expert_R = np.nonzero(self.shares_SE > 0)
        self._expert_R = expert_R.astype(np.int32)
        # Per step, so that a window needs no division.
        self._share_R = self.shares_SE[server_R, expert_R] / steps
        self._first_S = np.searchsorted(server_R, np.arange(len(shares_SE) + 1)).astype(np.int64)

    def batch_s(self, load_E: Loads) -> float:
        """See `CostModel`: `steps` steps of one layer."""
        return self.steps * (self.fixed_s + self.step_s(load_E))

    def step_s(self, load_E: Loads) -> float:
        """What the slowest server takes for a step of that load (over all steps), in seconds."""
        return _select.step_time(
            load_E, len(load_E), self._expert_R, self._share_R, len(self._expert_R),
            self._first_S, len(self.shares_SE), self.load_s, self.pair_s,
        )  # fmt: skip

    def imbalance(self, load_E: Loads) -> float:
        """See `CostModel`: pairs of the busiest server over the mean (PAR)."""
        pairs_S = self.shares_SE @ load_E
        mean = float(pairs_S.mean())
        return float(pairs_S.max()) / mean if mean > 0 else 1.0

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """See `CostModel`: least time of the slowest server and of the mean one."""
        requests, experts = window_WE.shape
        step_s = _select.for_servers(
            window_WE, requests, experts, start_E, chosen, have, len(chosen),
            self._expert_R, self._share_R, len(self._expert_R), self._first_S,
            len(self.shares_SE), self.load_s, self.pair_s,
        )  # fmt: skip
        return self.steps * (self.fixed_s + step_s)
