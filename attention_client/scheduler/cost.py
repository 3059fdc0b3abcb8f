"""Cost models: the time of a batch as a function of the experts' loads.

Strategies minimise it, and simulators use it as the time.

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


# Share of the next batches' saving that lasts over many batches, and the number of batches compared.
# Both found by `python -m benchmarks.caps judge`.
_LASTING = 0.7
_BATCHES_AHEAD = 4


class CostModel(Protocol):
    """Predicts the time of a batch from the tokens on each expert."""

    def batch_s(self, load_E: Loads) -> float:
        """Predicted seconds of a batch with this total load."""

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """Fill `chosen` beyond its first `have` indices, one by one, so that the batch gets cheapest.

        Args:
            window_WE: Loads of the requests, contiguous, oldest first.
            start_E: Load that runs already, or None.
            chosen: int64; its first `have` indices are given.
            have: Number of given indices.

        Returns:
            Predicted seconds of the batch together with what runs already.
        """

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """Predicted saving of choosing over the next batches, as a share of their time; negative for a loss.

        It is less than the saving of the next batch alone, because later batches get the rest.

        Args:
            window_WE, start_E: As for `choose`; more requests than a batch.
            batch_size: Requests of a batch.
            bias: Observed over predicted time of chosen batches, relative to others.
        """

    def imbalance(self, load_E: Loads) -> float:
        """Slowest part relative to an even load; 1 at best."""


@dataclass(frozen=True)
class ImbalanceCost:
    """base_s x (1 + sensitivity x CV of the experts' loads): the execution model of CAPS.

    An even load is fastest, so `choose` adds complementary requests.

    Attributes:
        base_s: Seconds of a balanced batch.
        sensitivity: Relative slow-down at a coefficient of variation of 1.
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

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """See `CostModel`: a share of the next batch's saving. All experts count, so much of it lasts."""
        batch = np.arange(batch_size)
        by_age_s = self.choose(window_WE, start_E, batch, batch_size)
        by_choice_s = self.choose(window_WE, start_E, batch, 1)
        return _LASTING * (by_age_s / (by_choice_s * bias) - 1)

    def _factor(self, experts: int, total: float, squares: float) -> float:
        if total <= 0:
            return 1.0
        return 1 + self.sensitivity * math.sqrt(max(experts * squares / total**2 - 1, 0))


class ServerCost:
    """The time of decode steps on expert servers, through a placement.

    In a step each request has one token, and its load spread over `steps` of them. A step of a layer takes

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
        # Per step, to avoid dividing each window.
        self._share_R = shares_LSE[layer_R, server_R, expert_R] / steps
        bounds = np.arange(layers * servers + 1)
        self._first_S = np.searchsorted(layer_R * servers + server_R, bounds).astype(np.int64)
        self._layers, self._servers = int(layers), int(layers * servers)

    def batch_s(self, load_E: Loads) -> float:
        """See `CostModel`: `steps` steps of all layers."""
        return self.steps * (self._layers * self.fixed_s + self.step_s(load_E))

    def step_s(self, load_E: Loads) -> float:
        """Seconds of the slowest servers for a step; the load is that of all steps."""
        return _select.step_time(
            load_E, len(load_E), self._expert_R, self._share_R, len(self._expert_R),
            self._first_S, self._servers, self._layers, self.load_s, self.pair_s,
        )  # fmt: skip

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """See `CostModel`: a share of the saving of a better order of the oldest requests.

        Compares several batches: only the slowest server counts, so one cheap batch may take all of the gain.
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
        """See `CostModel`: pairs of the busiest server over the mean (PAR), averaged over layers."""
        load_LE = load_E.reshape(self._layers, -1)
        pairs_LS = np.einsum("lse,le->ls", self.shares_LSE, load_LE)
        mean_L = pairs_LS.mean(axis=1)
        loaded_L = mean_L > 0
        if not loaded_L.any():
            return 1.0
        return float(np.mean(pairs_LS.max(axis=1)[loaded_L] / mean_L[loaded_L]))

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """See `CostModel`: least time of the slowest plus the mean server."""
        requests, experts = window_WE.shape
        step_s = _select.for_servers(
            window_WE, requests, experts, start_E, chosen, have, len(chosen),
            self._expert_R, self._share_R, len(self._expert_R), self._first_S,
            self._servers, self._layers, self.load_s, self.pair_s,
        )  # fmt: skip
        return self.steps * (self._layers * self.fixed_s + step_s)
