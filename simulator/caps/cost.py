"""Execution models of the simulator: the time of a batch from the tokens on each expert.

Letters: E logical experts, S expert servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from attention_client.scheduler.strategies import Loads

__all__ = ["CostModel", "ImbalanceCost", "ServerCost"]


class CostModel(Protocol):
    """Gives the time of a batch and its imbalance."""

    def batch_s(self, load_E: Loads) -> float:
        """Return the seconds of a batch with this total load."""

    def imbalance(self, load_E: Loads) -> float:
        """Return the slowest part's load relative to an even one; 1 at best."""


@dataclass(frozen=True)
class ImbalanceCost:
    """Execution model of CAPS: base_s x (1 + sensitivity x CV of the experts' loads).

    Attributes:
        base_s: Seconds of a balanced batch.
        sensitivity: Relative slow-down at a coefficient of variation of 1.
    """

    base_s: float
    sensitivity: float

    def batch_s(self, load_E: Loads) -> float:
        """Return the seconds of a batch by its imbalance (see `CostModel`)."""
        return self.base_s * self.imbalance(load_E)

    def imbalance(self, load_E: Loads) -> float:
        """Return the slow-down of an uneven load, 1 + sensitivity x CV (see `CostModel`)."""
        total = float(load_E.sum())
        if total <= 0:
            return 1.0
        squared_cv = len(load_E) * float(load_E @ load_E) / total**2 - 1
        return 1 + self.sensitivity * math.sqrt(max(squared_cv, 0))


@dataclass(frozen=True)
class ServerCost:
    """Execution model of decode steps on expert servers, to which the experts are dealt in turn.

    In a step each request has one token, and its load is spread over `steps` steps. A step takes

        fixed_s + max over servers of max(load_s x active experts, pair_s x pairs)

    A server reads the weights of each active expert (load_s) and computes each (token, expert) pair (pair_s).
    The number of active experts is an expectation (Poisson).

    Attributes:
        servers: S.
        fixed_s: Seconds of a step at any load.
        load_s: Seconds per active expert of a server.
        pair_s: Seconds per pair of a server.
        steps: Tokens that a request's load stands for.
    """

    servers: int
    fixed_s: float
    load_s: float
    pair_s: float
    steps: int

    def batch_s(self, load_E: Loads) -> float:
        """Return the seconds of a batch, `steps` decode steps (see `CostModel`)."""
        pairs_E = load_E / self.steps
        weights_S = self.load_s * self._by_server(1 - np.exp(-pairs_E))
        times_S = np.maximum(weights_S, self.pair_s * self._by_server(pairs_E))
        return self.steps * (self.fixed_s + float(times_S.max()))

    def imbalance(self, load_E: Loads) -> float:
        """Return the busiest server's pairs over the mean, PAR (see `CostModel`)."""
        pairs_S = self._by_server(load_E)
        return float(pairs_S.max() / pairs_S.mean()) if pairs_S.any() else 1.0

    def _by_server(self, value_E: Loads) -> Loads:
        server_E = np.arange(len(value_E)) % self.servers
        return np.bincount(server_E, value_E, self.servers).astype(np.float64)
