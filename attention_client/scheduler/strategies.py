"""Selection strategies: each chooses which waiting requests form the next batch, live and in simulations.

Letters: W requests of the window, B batch size, E logical experts, d random candidates. L is the load of the
batch so far and of the running requests, v the load of a candidate.

Products of loads are sums of `einsum`, not of BLAS, whose threads would spin beside the engine's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from eaas.errors import ConfigError

__all__ = ["Context", "Fcfs", "Indices", "Loads", "SelectionStrategy", "strategy", "strategy_names"]

Loads = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Context:
    """Information for a strategy in addition to the window.

    Attributes:
        running_E: Load of requests that continue to run, float64 (E,). None: nothing runs.
    """

    running_E: Loads | None = None


class SelectionStrategy(ABC):
    """Chooses which waiting requests run together in the next batch.

    To add one, subclass this in your own package, set `name`, and register the class under that name as an
    entry point of the group `eaas.strategies`:

        [project.entry-points."eaas.strategies"]
        mine = "my_package:Mine"

    Every command then accepts that name. The class is instantiated without arguments.

    Attributes:
        name: Name of the strategy.
        needs_loads: Whether it reads loads; if not, none are predicted.
    """

    name: ClassVar[str]
    needs_loads: ClassVar[bool] = True

    @abstractmethod
    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the requests of the next batch. Called by `RequestQueue` if more requests wait than fit.

        Must be pure (no clock, no I/O, no state between calls, randomness only from `rng`), so that a
        replayed queue makes the same choices.

        Args:
            window_WE: Predicted tokens of each waiting request on each expert, float64 (W, E),
                C-contiguous, oldest first. Finite and not negative. Read-only.
            batch_size: Requests wanted, at least 1.
            rng: The only source of randomness.
            context: Load of the running requests.

        Returns:
            min(W, batch_size) different indices into the window, int64. They must include 0, the oldest
            request, so that no request waits for ever.
        """


# -- by age, at random, by length ------------------------------------------------------------------------


class Fcfs(SelectionStrategy):
    """Takes the oldest requests: first come, first served, the default. O(B)."""

    name = "fcfs"
    needs_loads = False

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest requests (see `SelectionStrategy`)."""
        return np.arange(min(len(window_WE), batch_size))


class Random(SelectionStrategy):
    """Takes the oldest request and random others; shows the gain of mixing without a prediction. O(W)."""

    name = "random"
    needs_loads = False

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest request and random others (see `SelectionStrategy`)."""
        return _with_oldest(1 + rng.permutation(len(window_WE) - 1), batch_size)


class Lpt(SelectionStrategy):
    """Takes the oldest request, then those with the highest load on one expert. O(W E + W log W).

    Longest processing time first, Graham's list scheduling: loads on experts are the times.
    """

    name = "lpt"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest request and those of highest peak load (see `SelectionStrategy`)."""
        return _with_oldest(_longest_first(window_WE), batch_size)


def _longest_first(window_WE: Loads) -> Indices:
    """Return all but the oldest request, by falling peak load; of equals the older first."""
    return 1 + np.argsort(-window_WE[1:].max(axis=1, initial=0.0), kind="stable")


def _with_oldest(ranked: Indices, batch_size: int) -> Indices:
    return np.concatenate(([0], ranked[: batch_size - 1]))


# -- one request at a time -------------------------------------------------------------------------------


class _Greedy(SelectionStrategy):
    """Base class: takes the oldest, then one by one the request of least score; of equals, the older.

    O(B W E), or O(B d E). After "Heuristics for Vector Bin Packing" (Panigrahy et al., 2011). If all requests
    have equal totals, Var(L + v), |L + v|^2 and the distance from an even load rank candidates alike.

    Attributes:
        d: Random candidates of each step, drawn anew; 0: all are candidates.
    """

    d: int = 0

    @abstractmethod
    def score(self, rows_CE: Loads, load_E: Loads, level: float) -> Loads:
        """Return the scores of candidates v, (C,), given L; less is better.

        Args:
            rows_CE: Loads of the candidates.
            load_E: L.
            level: Load of each expert if a full batch of mean requests were even.
        """

    def ranked(self, window_WE: Loads) -> Indices:
        """Return all but the oldest request; of equal scores the first of them wins: by age."""
        return np.arange(1, len(window_WE))

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the next batch by the least scores (see `SelectionStrategy`)."""
        level = batch_size * float(window_WE.mean())
        load_E = window_WE[0] + (0.0 if context.running_E is None else context.running_E)
        chosen, left = [0], self.ranked(window_WE)
        while len(chosen) < batch_size and len(left):
            if 0 < self.d < len(left):
                seen = np.sort(rng.choice(left, self.d, replace=False))
                best = seen[self.score(window_WE[seen], load_E, level).argmin()]
            else:
                # All rows: to copy those that are left would take longer.
                best = left[self.score(window_WE, load_E, level)[left].argmin()]
            chosen.append(int(best))
            left = left[left != best]
            load_E = load_E + window_WE[best]
        return np.array(chosen)


class NormMinimizing(_Greedy):
    """Takes the candidate with the least |L + v|^2."""

    name = "norm_minimizing"

    def score(self, rows_CE: Loads, load_E: Loads, level: float) -> Loads:
        """Return |L + v|^2 without the constant |L|^2 (see `_Greedy`)."""
        return 2 * _dots(rows_CE, load_E) + _squares(rows_CE)


class GreedyVariance(NormMinimizing):
    """Takes the candidate with the least Var(L + v), the objective of CAPS."""

    name = "greedy_variance"

    def score(self, rows_CE: Loads, load_E: Loads, level: float) -> Loads:
        """Return E Var(L + v) = |L + v|^2 - sum(L + v)^2 / E, without |L|^2 (see `_Greedy`)."""
        total_C = load_E.sum() + rows_CE.sum(axis=1)
        squares_C = super().score(rows_CE, load_E, level)
        return np.asarray(squares_C - total_C**2 / len(load_E))


class BestFit(NormMinimizing):
    """Takes the candidate that brings L + v closest to the even load of a full batch of mean requests."""

    name = "best_fit"

    def score(self, rows_CE: Loads, load_E: Loads, level: float) -> Loads:
        """Return |L + v - level|^2 without a constant (see `_Greedy`)."""
        return super().score(rows_CE, load_E - level, level)


class GreedyDotProduct(_Greedy):
    """Takes the candidate with the least v.L, that is, the least load on busy experts."""

    name = "greedy_dot_product"

    def score(self, rows_CE: Loads, load_E: Loads, level: float) -> Loads:
        """Return v.L (see `_Greedy`)."""
        return _dots(rows_CE, load_E)


class PowerOfD(GreedyVariance):
    """Takes the least Var(L + v) among d random candidates.

    After "The Power of Two Choices in Randomized Load Balancing" (Mitzenmacher, 2001).
    """

    name = "power_of_d"
    d = 8


class PowerOfDDot(GreedyDotProduct):
    """Takes the least v.L among d random candidates."""

    name = "power_of_d_dot"
    d = 8


class LptBalanced(_Greedy):
    """Takes the request with the least makespan, the load of the hottest expert; of equals the longest."""

    name = "lpt_balanced"

    def score(self, rows_CE: Loads, load_E: Loads, level: float) -> Loads:
        """Return the makespans (see `_Greedy`)."""
        return np.asarray((load_E + rows_CE).max(axis=1))

    def ranked(self, window_WE: Loads) -> Indices:
        """Return all but the oldest request, the longest first (see `_Greedy`)."""
        return _longest_first(window_WE)


def _dots(rows_CE: Loads, load_E: Loads) -> Loads:
    return np.asarray(np.einsum("ce,e->c", rows_CE, load_E), np.float64)


def _squares(rows_CE: Loads) -> Loads:
    return np.asarray(np.einsum("ce,ce->c", rows_CE, rows_CE), np.float64)


# -- partitions of the window ----------------------------------------------------------------------------


class Differencing(SelectionStrategy):
    """Splits the window by load vectors into similar batches; takes the oldest request's. O(W^2 E).

    The balanced largest differencing method (Michiels et al., "Performance Ratios for the Differencing Method
    Applied to the Balanced Number Partitioning Problem", 2003): Karmarkar and Karp's method with groups of
    equal size. If the window is no multiple of the batch size, the youngest requests are left out.
    """

    name = "differencing"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest request's batch of a split (see `SelectionStrategy`)."""
        groups = len(window_WE) // batch_size
        if groups <= 1:
            return np.arange(min(len(window_WE), batch_size))
        found = _split(window_WE[: groups * batch_size], groups)
        return np.sort(next(members for members in found if 0 in members))


class KarmarkarKarp(Differencing):
    """Splits the window by the load of each request's hottest expert. O(W E + W^2)."""

    name = "karmarkar_karp"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest request's batch of a split by hottest expert (see `SelectionStrategy`)."""
        return super().select(window_WE.max(axis=1, keepdims=True), batch_size, rng, context)


def _split(sizes_WE: Loads, groups: int) -> Indices:
    """Split requests into groups of equal size and similar sums: int64 (groups, W / groups).

    Starts with partial splits of one request in each group. Joins the two whose groups differ most, so that
    they compensate: the largest group first, each with the other split's group of the least dot product.
    """
    order_W = np.argsort(-_squares(sizes_WE), kind="stable")
    parts = [
        _Part.of(sizes_WE[order_G], order_G[:, None]) for order_G in order_W.reshape(-1, groups)
    ]
    while len(parts) > 1:
        differing = np.argsort([-part.spread for part in parts], kind="stable")
        a, b = sorted(differing[:2].tolist())
        parts[a] = parts[a].joined(parts[b])
        parts[b] = parts[-1]
        parts.pop()
    return parts[0].members_GN


@dataclass(frozen=True)
class _Part:
    """A partial split: the sum and the requests of each group, and how much the sums differ.

    Attributes:
        spread: The sum over experts of the largest less the least group.
    """

    sums_GE: Loads
    members_GN: Indices
    spread: float

    @classmethod
    def of(cls, sums_GE: Loads, members_GN: Indices) -> _Part:
        """Make a part of these groups, for `_split`."""
        return cls(sums_GE, members_GN, float(np.ptp(sums_GE, axis=0).sum()))

    def joined(self, other: _Part) -> _Part:
        """Add a group of the other part to each of this one's, the largest first (see `_split`)."""
        meets_GG = np.einsum("ge,he->gh", self.sums_GE, other.sums_GE)
        partner_G = np.empty(len(meets_GG), dtype=np.int64)
        for g in np.argsort(-_squares(self.sums_GE), kind="stable").tolist():
            partner_G[g] = meets_GG[g].argmin()
            meets_GG[:, partner_G[g]] = np.inf
        members_GN = np.concatenate((self.members_GN, other.members_GN[partner_G]), axis=1)
        return _Part.of(self.sums_GE + other.sums_GE[partner_G], members_GN)


# -- by name ---------------------------------------------------------------------------------------------

_GROUP = "eaas.strategies"

_OURS: dict[str, type[SelectionStrategy]] = {
    each.name: each
    for each in (
        *(Fcfs, Random, Lpt, LptBalanced, KarmarkarKarp, Differencing, GreedyVariance),
        *(GreedyDotProduct, NormMinimizing, BestFit, PowerOfD, PowerOfDDot),
    )
}
# Former names, with their successors.
_FORMER = {"cost_bounded": "greedy_variance"}


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies: the twelve of CAPS, then those of other packages."""
    return (*_OURS, *sorted(_others()))


def strategy(name: str) -> SelectionStrategy:
    """Make the selection strategy that a config or command names.

    Raises:
        ConfigError: The name is unknown, or its package cannot be used.
    """
    if name in _OURS:
        return _OURS[name]()
    others = _others()
    if name in others:
        return _load(others[name])
    if name in _FORMER:
        raise ConfigError(
            f"strategy {name!r} is gone: {_FORMER[name]!r} chooses by the experts' loads, "
            "and 'fcfs', the default, by age"
        )
    raise ConfigError(f"strategy {name!r} is unknown: choose one of {', '.join(strategy_names())}")


def _others() -> dict[str, EntryPoint]:
    """Return the strategies of other packages by name. They cannot replace a built-in name."""
    return {found.name: found for found in entry_points(group=_GROUP) if found.name not in _OURS}


def _load(found: EntryPoint) -> SelectionStrategy:
    try:
        made = found.load()()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"strategy {found.name!r} ({found.value}): {error}") from error
    if not isinstance(made, SelectionStrategy):
        raise ConfigError(
            f"strategy {found.name!r} ({found.value}) is no subclass of "
            f"{SelectionStrategy.__module__}.{SelectionStrategy.__qualname__}"
        )
    return made
