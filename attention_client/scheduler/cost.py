"""Cost models, for a client and for simulations: predict the time of a batch from the experts' loads.

Strategies minimise the predicted time, and simulators use it as the true time.

Letters: W requests of the window, E logical experts, L MoE layers, S expert servers, R replicas.
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


# Share of the next batches' saving that lasts over many batches, and the number of batches compared. Both
# were found by `python -m benchmarks.caps judge`.
_LASTING = 0.7
_BATCHES_AHEAD = 4


class CostModel(Protocol):
    """Predicts the time of a batch from the tokens on each expert."""

    def batch_s(self, load_E: Loads) -> float:
        """Return the predicted seconds of a batch with this total load; the true ones in simulations."""

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """Complete a batch: fill `chosen` beyond its first `have` indices, one by one, with the cheapest.

        Args:
            window_WE: Loads of the waiting requests, contiguous, oldest first.
            start_E: Load of requests that run already, or None.
            chosen: int64 indices into the window; the first `have` are given.
            have: Number of given indices.

        Returns:
            Predicted seconds of the batch together with the requests that run already.
        """

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """Predict how much time choosing saves over taking the oldest, as a share; negative for a loss.

        The share is over the next batches. It is less than the saving of the next batch alone, because later
        batches get the requests that it leaves.

        Args:
            window_WE, start_E: As for `choose`; more requests than a batch.
            batch_size: Requests of a batch.
            bias: Observed over predicted time of chosen batches, relative to others.
        """

    def imbalance(self, load_E: Loads) -> float:
        """Return the slowest part's load relative to an even one, for the simulator's reports; 1 at best."""


@dataclass(frozen=True)
class ImbalanceCost:
    """Cost model of CAPS: base_s x (1 + sensitivity x CV of the experts' loads).

    An even load is fastest, so `choose` adds complementary requests.

    Attributes:
        base_s: Seconds of a balanced batch.
        sensitivity: Relative slow-down at a coefficient of variation of 1.
    """

    base_s: float
    sensitivity: float

    def batch_s(self, load_E: Loads) -> float:
        """Predict the seconds of a batch from its imbalance (see `CostModel`).

        For the simulator; live clients use `ServerCost`.
        """
        return self.base_s * self.imbalance(load_E)

    def imbalance(self, load_E: Loads) -> float:
        """Return the slow-down of an uneven load, 1 + sensitivity x CV (see `CostModel`)."""
        return self._factor(len(load_E), float(np.add.reduce(load_E)), float(load_E @ load_E))

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """Complete a batch with the requests that give the least variance (see `CostModel`)."""
        requests, experts = window_WE.shape
        total, squares = _select.greedy(
            window_WE, requests, experts, start_E, chosen, have, len(chosen), 1.0, 0.0, 1.0, None, 0
        )
        return self.base_s * self._factor(experts, total, squares)

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """Predict the saving of choosing as a share of the next batch's saving (see `CostModel`).

        Much of that saving lasts, because all experts count.
        """
        batch = np.arange(batch_size)
        by_age_s = self.choose(window_WE, start_E, batch, batch_size)
        by_choice_s = self.choose(window_WE, start_E, batch, 1)
        return _LASTING * (by_age_s / (by_choice_s * bias) - 1)

    def _factor(self, experts: int, total: float, squares: float) -> float:
        if total <= 0:
            return 1.0
        return 1 + self.sensitivity * math.sqrt(max(experts * squares / total**2 - 1, 0))


class ServerCost:
    """Cost model of decode steps on expert servers, through a placement.

    In a step each request has one token, and its load is spread over `steps` steps. A step of a layer takes

        fixed_s + max over servers of max(load_s x active experts, pair_s x pairs)

    A server reads the weights of each active expert (load_s) and computes each (token, expert) pair (pair_s).
    The number of active experts is an expectation (Poisson), and each replica takes its share. If weights
    dominate, similar requests are best, because they share experts; if pairs dominate, complementary ones.

    Args:
        shares: The placement: share of each expert's tokens on each server, for one layer (S, E) or several
            (L, S, E); sums to 1 over S. With several layers a load is (L E,), layer by layer.
        fixed_s: Seconds of a layer's step at any load.
        load_s: Seconds per active expert of a server.
        pair_s: Seconds per pair of a server.
        steps: Tokens that a request's load stands for.

    Raises:
        ConfigError: A number is negative, or an expert's shares do not sum to 1.
    """

    def __init__(
        self, shares: Loads, *, fixed_s: float, load_s: float, pair_s: float, steps: int
    ) -> None:
        if min(fixed_s, load_s, pair_s) < 0 or steps < 1:
            raise ConfigError(
                f"cost model: fixed_s {fixed_s}, load_s {load_s}, pair_s {pair_s}, steps {steps}: "
                "times must not be negative, and steps must be at least 1"
            )
        shares_LSE = np.asarray(shares[None] if shares.ndim == 2 else shares, dtype=np.float64)
        if shares_LSE.ndim != 3 or not np.allclose(shares_LSE.sum(axis=1), 1, atol=1e-4):
            raise ConfigError(
                "cost model: the shares of each expert over the servers must sum to 1"
            )
        self.shares_LSE = shares_LSE
        self.fixed_s, self.load_s, self.pair_s, self.steps = fixed_s, load_s, pair_s, steps
        layers, servers, experts = shares_LSE.shape
        layer_R, server_R, expert_R = np.nonzero(shares_LSE > 0)
        self._expert_R = (layer_R * experts + expert_R).astype(np.int32)
        # Shares per step, to avoid dividing each window.
        self._share_R = shares_LSE[layer_R, server_R, expert_R] / steps
        bounds = np.arange(layers * servers + 1)
        self._first_S = np.searchsorted(layer_R * servers + server_R, bounds).astype(np.int64)
        self._layers, self._servers = int(layers), int(layers * servers)

    def batch_s(self, load_E: Loads) -> float:
        """Predict the seconds of a batch: `steps` decode steps through all layers (see `CostModel`)."""
        return self.steps * (self._layers * self.fixed_s + self.step_s(load_E))

    def step_s(self, load_E: Loads) -> float:
        """Return the seconds of one decode step: the slowest server of each layer, without `fixed_s`.

        Args:
            load_E: Load of all steps.
        """
        return _select.step_time(
            load_E, len(load_E), self._expert_R, self._share_R, len(self._expert_R),
            self._first_S, self._servers, self._layers, self.load_s, self.pair_s,
        )  # fmt: skip

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """Predict the saving of choosing from a better order of the oldest requests (see `CostModel`).

        Compares several batches, because only the slowest server counts and so one cheap batch may take all
        of the gain.
        """
        ahead_WE = window_WE[: _BATCHES_AHEAD * batch_size]
        requests, experts = ahead_WE.shape
        by_age_s, by_choice_s = _select.compare_orders(
            ahead_WE, requests, experts, batch_size,
            self._expert_R, self._share_R, len(self._expert_R), self._first_S,
            self._servers, self._layers, self.load_s, self.pair_s,
        )  # fmt: skip
        fixed_s = self._layers * self.fixed_s * math.ceil(requests / batch_size)
        saved: float = (by_age_s + fixed_s) / ((by_choice_s + fixed_s) * bias) - 1
        return _LASTING * saved

    def imbalance(self, load_E: Loads) -> float:
        """Return the busiest server's pairs over the mean (PAR), averaged over layers (see `CostModel`)."""
        load_LE = load_E.reshape(self._layers, -1)
        pairs_LS = np.einsum("lse,le->ls", self.shares_LSE, load_LE)
        mean_L = pairs_LS.mean(axis=1)
        loaded_L = mean_L > 0
        if not loaded_L.any():
            return 1.0
        return float(np.mean(pairs_LS.max(axis=1)[loaded_L] / mean_L[loaded_L]))

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """Complete a batch for the least time of the slowest plus the mean server (see `CostModel`)."""
        requests, experts = window_WE.shape
        step_s = _select.for_servers(
            window_WE, requests, experts, start_E, chosen, have, len(chosen),
            self._expert_R, self._share_R, len(self._expert_R), self._first_S,
            self._servers, self._layers, self.load_s, self.pair_s,
        )  # fmt: skip
        return self.steps * (self._layers * self.fixed_s + step_s)
