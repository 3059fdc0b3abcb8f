"""Cost models: the time of a batch as a function of the experts' loads.

Strategies minimise it, and simulators use it as the time.

Letters: W requests of the window, E logical experts, L MoE layers, S expert servers, R replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from attention_client.scheduler.strategies.base import Indices, Loads
from attention_client.scheduler.strategies.greedy import choose_greedily
from eaas.errors import ConfigError

__all__ = ["CostModel", "ImbalanceCost", "Loads", "ServerCost"]

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
            window_WE: Loads of the requests, oldest first.
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
        total = float(np.add.reduce(load_E))
        if total <= 0:
            return 1.0
        squared_cv = len(load_E) * float(load_E @ load_E) / total**2 - 1
        return 1 + self.sensitivity * math.sqrt(max(squared_cv, 0))

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """See `CostModel`: least variance."""
        return self.batch_s(
            choose_greedily(window_WE, start_E, chosen, have, square=1.0, variance=1.0)
        )

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """See `CostModel`: a share of the next batch's saving. All experts count, so much of it lasts."""
        batch = np.arange(batch_size)
        by_age_s = self.choose(window_WE, start_E, batch, batch_size)
        by_choice_s = self.choose(window_WE, start_E, batch, 1)
        return _LASTING * (by_age_s / (by_choice_s * bias) - 1)


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
        self._layers, self._servers = layers, servers
        layer_R, server_R, expert_R = np.nonzero(shares_LSE > 0)
        self._expert_R = layer_R * experts + expert_R
        self._share_R1 = shares_LSE[layer_R, server_R, expert_R][:, None] / steps
        # Whether a server, counted once per layer, holds a replica.
        self._holds_SR = np.zeros((layers * servers, len(expert_R)))
        self._holds_SR[layer_R * servers + server_R, np.arange(len(expert_R))] = 1.0
        self._replicas_S1 = self._holds_SR.sum(axis=1, keepdims=True)

    def batch_s(self, load_E: Loads) -> float:
        """See `CostModel`: `steps` steps of all layers."""
        idle_R1, pairs_S1 = self._fold(load_E[:, None])
        times_LS1 = self._times(self._holds_SR @ idle_R1, pairs_S1)
        step_s: float = self._layers * self.fixed_s + times_LS1.max(axis=1).sum().item()
        return self.steps * step_s

    def _fold(self, load_EW: Loads) -> tuple[Loads, Loads]:
        """Each replica's probability to get no pair in a step (R, W), and each server's pairs (S, W)."""
        pairs_RW = self._share_R1 * load_EW[self._expert_R]
        return np.exp(-pairs_RW), self._holds_SR @ pairs_RW

    def _times(self, idle_SW: Loads, pairs_SW: Loads) -> Loads:
        """Seconds of each server for a step (L, S, W), from its expected idle replicas and its pairs."""
        active_SW = self._replicas_S1 - idle_SW
        times_SW: Loads = np.maximum(self.load_s * active_SW, self.pair_s * pairs_SW)
        return times_SW.reshape(self._layers, self._servers, -1)

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """See `CostModel`: a share of the saving of a better order of the oldest requests.

        Compares several batches: only the slowest server counts, so one cheap batch may take all of the gain.
        """
        rest_WE = ahead_WE = window_WE[: _BATCHES_AHEAD * batch_size]
        by_age_s = by_choice_s = 0.0
        for begin in range(0, len(ahead_WE), batch_size):
            by_age_s += self.batch_s(ahead_WE[begin : begin + batch_size].sum(axis=0))
            chosen = np.zeros(min(batch_size, len(rest_WE)), dtype=np.int64)
            by_choice_s += self.choose(rest_WE, None, chosen, 1)
            rest_WE = np.delete(rest_WE, chosen, axis=0)
        return _LASTING * (by_age_s / (by_choice_s * bias) - 1)

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
        """See `CostModel`: least time of the slowest plus the mean server.

        The slowest alone would ignore what is added to other servers.
        """
        load_E = window_WE[chosen[:have]].sum(axis=0) + (0.0 if start_E is None else start_E)
        if have < len(chosen):
            idle_RW, pairs_SW = self._fold(window_WE.T)
            idle_R1, pairs_S1 = self._fold(load_E[:, None])
            taken_W = np.zeros(len(window_WE))
            taken_W[chosen[:have]] = np.inf
            for place in range(have, len(chosen)):
                times_LSW = self._times((self._holds_SR * idle_R1.T) @ idle_RW, pairs_S1 + pairs_SW)
                score_W = (times_LSW.max(axis=1) + times_LSW.mean(axis=1)).sum(axis=0)
                chosen[place] = best = int(np.argmin(score_W + taken_W))
                taken_W[best] = np.inf
                idle_R1 *= idle_RW[:, best : best + 1]
                pairs_S1 += pairs_SW[:, best : best + 1]
                load_E += window_WE[best]
        return self.batch_s(load_E)
