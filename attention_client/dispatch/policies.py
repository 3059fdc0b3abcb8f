"""Dispatch policies: choose a replica for each chunk.

`weights` follows the placement's shares. `least_loaded` starts there and moves chunks off the server that
would finish last, by measured speeds and this client's work in flight. `split` starts from the best shares
for this call, which single moves cannot always reach. `round_robin` and `random` are baselines.
Shape suffixes: C chunks, S servers, E logical experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attention_client.dispatch import _dispatch
from attention_client.dispatch.parts import NOWHERE, Chunks
from eaas.errors import ConfigError
from eaas.minmax import split_of

__all__ = ["CHUNK_STEP", "ByShares", "DispatchPolicy", "Load", "dispatch_policy"]

# Multiples modulo 1 of either number are evenly spread, and so are the points of both (1/g and 1/g**2 of the
# plastic number g: M. Roberts' R2 sequence).
_CALL_STEP = 0.7548776662466927
CHUNK_STEP = 0.5698402909980532
_LAYER_STEP = 0.6180339887498949


@dataclass(frozen=True, eq=False)
class Load:
    """Load of the servers, as this client knows it.

    Attributes:
        rate_S: float64, seconds per unit of work (`Chunks.work_C`).
        backlog_S: float64, expected seconds until this client's requests in flight are done.
    """

    rate_S: npt.NDArray[np.float64]
    backlog_S: npt.NDArray[np.float64]


class DispatchPolicy(Protocol):
    """Chooses replicas. Thread-safe."""

    def choose(
        self, chunks: Chunks, shares_SE: npt.NDArray[np.float32], load: Load, layer: int = 0
    ) -> npt.NDArray[np.int64]:
        """Choose a server for each chunk.

        Args:
            chunks: Chunks of one layer call.
            shares_SE: The placement's shares of that layer, contiguous; 0 for servers not to ask.
            load: Load of the servers.
            layer: Layer of the call.

        Returns:
            int64 (C,): a server with a share of the chunk's expert; NOWHERE if there is none.
        """


class _Calls:
    """Counts calls per layer.

    Layers call in turns, and every second or fourth number of an even sequence is not evenly spread.
    """

    def __init__(self) -> None:
        self._layers: dict[int, itertools.count[int]] = {}

    def next(self, layer: int) -> int:
        """The layer's next number: 0, 1, 2, ..."""
        return next(self._layers.setdefault(layer, itertools.count()))

    def draw(self, layer: int) -> float:
        """A number in [0, 1), evenly spread over a layer's calls, with an offset per layer."""
        return (self.next(layer) * _CALL_STEP + layer * _LAYER_STEP) % 1.0


class ByShares:
    """In proportion to the placement's shares, evenly over the chunks of a call and over calls.

    Step 1: choose by the shares. Step 2, if levelling: move chunks of the server that would finish last to
    another replica, the most helpful move first, while the call finishes earlier. So the placement's shares
    hold if servers are as fast and as idle as its plan assumed.

    Args:
        levels: Whether to do step 2.
    """

    def __init__(self, *, levels: bool) -> None:
        self.levels = levels
        self._calls = _Calls()

    def draw(self, layer: int) -> float:
        """Position in [0, 1) at which the first chunk of the layer's next call looks up the shares."""
        return self._calls.draw(layer)

    def choose(
        self, chunks: Chunks, shares_SE: npt.NDArray[np.float32], load: Load, layer: int = 0
    ) -> npt.NDArray[np.int64]:
        """See `DispatchPolicy`; `plan` does this and all around it in one C call."""
        servers, experts = shares_SE.shape
        count = chunks.expert_C.size
        server_C = np.empty(count, dtype=np.int64)
        _dispatch.by_share(
            chunks.expert_C,
            count,
            shares_SE,
            servers,
            experts,
            self.draw(layer),
            CHUNK_STEP,
            server_C,
        )
        if self.levels:
            _dispatch.level(
                server_C, chunks.expert_C, chunks.work_C, count,
                shares_SE, servers, experts, load.rate_S, load.backlog_S.copy(),
            )  # fmt: skip
        return server_C


class _Split:
    """By the min-max split of the call (see `eaas.minmax`), then level.

    Step 1: compute the shares that would finish soonest if chunks were divisible. Step 2: choose by these
    shares, evenly over each expert's chunks. Step 3: level, as `ByShares` does.
    """

    def __init__(self) -> None:
        self._calls = _Calls()

    def choose(
        self, chunks: Chunks, shares_SE: npt.NDArray[np.float32], load: Load, layer: int = 0
    ) -> npt.NDArray[np.int64]:
        servers, experts = shares_SE.shape
        expert_C, work_C = chunks.expert_C, chunks.work_C
        work_E = np.bincount(expert_C, work_C, experts)
        best_SE, _ = split_of(work_E, shares_SE, 1 / load.rate_S, load.backlog_S / load.rate_S)
        # The i-th of an expert's n chunks covers (i, i + 1) / n of its load. The position inside that
        # interval differs by expert and by call.
        count_E = np.bincount(expert_C, minlength=experts)
        nth_C = np.arange(expert_C.size) - (np.cumsum(count_E) - count_E)[expert_C]
        draw_C = (self._calls.draw(layer) + expert_C * CHUNK_STEP) % 1.0
        part_C = (nth_C + draw_C) / count_E[expert_C]
        sum_SC = np.cumsum(best_SE[:, expert_C], axis=0)
        # Rounding can leave an expert's shares a little below 1 in sum.
        server_C: npt.NDArray[np.int64] = np.argmax(sum_SC > part_C * sum_SC[-1], axis=0)
        server_C[sum_SC[-1] == 0] = NOWHERE
        _dispatch.level(
            server_C, expert_C, work_C, expert_C.size,
            shares_SE, servers, experts, load.rate_S, load.backlog_S.copy(),
        )  # fmt: skip
        return server_C


class _RoundRobin:
    """The replicas of each expert in turn."""

    def __init__(self) -> None:
        self._calls = _Calls()

    def choose(
        self, chunks: Chunks, shares_SE: npt.NDArray[np.float32], load: Load, layer: int = 0
    ) -> npt.NDArray[np.int64]:
        holds_SC = shares_SE[:, chunks.expert_C] > 0
        replicas_C = holds_SC.sum(axis=0)
        turn_C = self._calls.next(layer) + np.arange(replicas_C.size)
        return _nth_holder(holds_SC, turn_C % np.maximum(replicas_C, 1))


class _Random:
    """A uniformly random replica."""

    def __init__(self, seed: int = 0) -> None:
        self._seeds = itertools.count(seed)

    def choose(
        self, chunks: Chunks, shares_SE: npt.NDArray[np.float32], load: Load, layer: int = 0
    ) -> npt.NDArray[np.int64]:
        holds_SC = shares_SE[:, chunks.expert_C] > 0
        rng = np.random.default_rng(next(self._seeds))
        return _nth_holder(holds_SC, rng.integers(np.maximum(holds_SC.sum(axis=0), 1)))


def _nth_holder(
    holds_SC: npt.NDArray[np.bool_], n_C: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The n-th server (from 0) that holds each chunk's expert; NOWHERE if none does."""
    server_C: npt.NDArray[np.int64] = np.argmax(np.cumsum(holds_SC, axis=0) > n_C, axis=0)
    server_C[~holds_SC.any(axis=0)] = NOWHERE
    return server_C


_POLICIES: dict[str, Callable[[], DispatchPolicy]] = {
    "least_loaded": partial(ByShares, levels=True),
    "split": _Split,
    "weights": partial(ByShares, levels=False),
    "round_robin": _RoundRobin,
    "random": _Random,
}


def dispatch_policy(name: str) -> DispatchPolicy:
    """Make a policy by name. Raises ConfigError, which lists the names."""
    try:
        return _POLICIES[name]()
    except KeyError:
        raise ConfigError(
            f"dispatch policy {name!r} is unknown; choose one of {', '.join(_POLICIES)}"
        ) from None
