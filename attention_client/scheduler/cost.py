"""What a batch costs, as far as the experts' loads decide it. A strategy minimises it, a simulator takes it
as the time.

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


# Of what the next batches save, what is kept over many; and batches that are ordered to see what that is.
# Both found by `eaas simulate policy`.
_KEPT = 0.7
_AHEAD = 4


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

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """What choosing saves over the batches to come, as a share of their time; negative where it costs.

        That is less than what it saves in the next batch: those after it get what that one left.

        Args:
            window_WE, start_E: As for `choose`; more requests than a batch.
            batch_size: Requests of a batch.
            bias: How much longer than predicted chosen batches turn out, against others.
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

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """See `CostModel`: a share of what the next batch saves. All experts count, so that much is left."""
        batch = np.arange(batch_size)
        by_age_s = self.choose(window_WE, start_E, batch, batch_size)
        by_choice_s = self.choose(window_WE, start_E, batch, 1)
        return _KEPT * (by_age_s / (by_choice_s * bias) - 1)

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
        shares: The placement: the share of each expert's tokens that each server takes, of one layer (S, E)
            or of several (L, S, E); over S sums to 1. With several, a load has an entry for each expert of
            each layer, (L E,), layer by layer.
        fixed_s: Seconds of a layer's step whatever the load.
        load_s: Seconds per active expert of a server.
        pair_s: Seconds per pair of a server.
        steps: Tokens that a request's load is of.

    Raises:
        ConfigError: A number is negative, or an expert's shares do not sum to 1.
    """

    def __init__(
        self, shares: Loads, *, fixed_s: float, load_s: float, pair_s: float, steps: int
    ) -> None:
        if min(fixed_s, load_s, pair_s) < 0 or steps < 1:
            raise ConfigError(
                f"cost model: fixed_s {fixed_s}, load_s {load_s}, pair_s {pair_s}, steps {steps}: "
                "none may be negative, and there is at least one step"
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
        # Per step, so that a window needs no division.
        self._share_R = shares_LSE[layer_R, server_R, expert_R] / steps
        bounds = np.arange(layers * servers + 1)
        self._first_S = np.searchsorted(layer_R * servers + server_R, bounds).astype(np.int64)
        self._layers, self._servers = int(layers), int(layers * servers)

    def batch_s(self, load_E: Loads) -> float:
        """See `CostModel`: `steps` steps of all layers."""
        return self.steps * (self._layers * self.fixed_s + self.step_s(load_E))

    def step_s(self, load_E: Loads) -> float:
        """What the slowest servers take for a step of that load (over all steps), in seconds."""
        return _select.step_time(
            load_E, len(load_E), self._expert_R, self._share_R, len(self._expert_R),
            self._first_S, self._servers, self._layers, self.load_s, self.pair_s,
        )  # fmt: skip

    def saving(
        self, window_WE: Loads, start_E: Loads | None, batch_size: int, bias: float
    ) -> float:
        """See `CostModel`: a share of what a better order of the oldest requests, in some batches, saves.

        The slowest server alone counts, so what makes one batch cheap may be all that there is of it.
        """
        ahead_WE = window_WE[: _AHEAD * batch_size]
        requests, experts = ahead_WE.shape
        by_age_s, by_choice_s = _select.compare_orders(
            ahead_WE, requests, experts, batch_size,
            self._expert_R, self._share_R, len(self._expert_R), self._first_S,
            self._servers, self._layers, self.load_s, self.pair_s,
        )  # fmt: skip
        fixed_s = self._layers * self.fixed_s * math.ceil(requests / batch_size)
        saved: float = (by_age_s + fixed_s) / ((by_choice_s + fixed_s) * bias) - 1
        return _KEPT * saved

    def imbalance(self, load_E: Loads) -> float:
        """See `CostModel`: pairs of the busiest server over the mean (PAR), a mean over layers."""
        load_LE = load_E.reshape(self._layers, -1)
        pairs_LS = np.einsum("lse,le->ls", self.shares_LSE, load_LE)
        mean_L = pairs_LS.mean(axis=1)
        loaded_L = mean_L > 0
        if not loaded_L.any():
            return 1.0
        return float(np.mean(pairs_LS.max(axis=1)[loaded_L] / mean_L[loaded_L]))

    def choose(self, window_WE: Loads, start_E: Loads | None, chosen: Indices, have: int) -> float:
        """See `CostModel`: least time of the slowest servers and of the mean ones."""
        requests, experts = window_WE.shape
        step_s = _select.for_servers(
            window_WE, requests, experts, start_E, chosen, have, len(chosen),
            self._expert_R, self._share_R, len(self._expert_R), self._first_S,
            self._servers, self._layers, self.load_s, self.pair_s,
        )  # fmt: skip
        return self.steps * (self._layers * self.fixed_s + step_s)
