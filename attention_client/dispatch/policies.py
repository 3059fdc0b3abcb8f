"""Which replica computes which chunk: the pluggable part of dispatch.

`weights` follows the placement. `least_loaded` starts from there and moves chunks off the server that would
end last, by what the servers were measured to take and by what this client has in flight on them. `split`
starts from the shares that are best for this call instead: where a server's load can only be passed on by way
of others, single moves do not find it.
`round_robin` and `random` know neither, and are what to compare with.
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

# Multiples of either, taken modulo 1, are spread evenly however many are taken, and so are the pairs of both
# (1/g and 1/g**2 of the plastic number g, M. Roberts' R2 sequence).
_CALL_STEP = 0.7548776662466927
CHUNK_STEP = 0.5698402909980532
_LAYER_STEP = 0.6180339887498949


@dataclass(frozen=True, eq=False)
class Load:
    """What this client knows about the servers' time.

    Attributes:
        rate_S: float64, seconds that a server takes for a unit of work (`Chunks.work_C`).
        backlog_S: float64, seconds until what this client has in flight there should be done.
    """

    rate_S: npt.NDArray[np.float64]
    backlog_S: npt.NDArray[np.float64]


class DispatchPolicy(Protocol):
    """Chooses replicas. May be called from several threads."""

    def choose(
        self, chunks: Chunks, shares_SE: npt.NDArray[np.float32], load: Load, layer: int = 0
    ) -> npt.NDArray[np.int64]:
        """One server for each chunk.

        Args:
            chunks: Of one layer call.
            shares_SE: The placement's shares of that layer, contiguous; 0 for servers that must not be asked.
            load: Of the servers.
            layer: Whose call it is.

        Returns:
            int64 (C,): a server with a share of the chunk's expert; NOWHERE where there is none.
        """


class _Calls:
    """Counts calls, each layer's by themselves.

    A model's layers call in turns: of numbers that are spread evenly one in two, or in four, is not.
    """

    def __init__(self) -> None:
        self._layers: dict[int, itertools.count[int]] = {}

    def next(self, layer: int) -> int:
        """0, 1, 2, ... for each layer."""
        return next(self._layers.setdefault(layer, itertools.count()))

    def draw(self, layer: int) -> float:
        """In [0, 1), spread evenly over the calls of a layer; layers begin at different places."""
        return (self.next(layer) * _CALL_STEP + layer * _LAYER_STEP) % 1.0


class ByShares:
    """In proportion to the placement's shares, evenly over the chunks of a call and over calls.

    With levelling, such that the slowest server ends soonest. Step 1: as the shares say. Step 2: as long as
    it makes the last server of this call end earlier, move that one of its chunks to another replica which
    helps the most. So a placement's plan holds where servers are as fast and as free as the plan assumed.

    Args:
        levels: Whether it levels.
    """

    def __init__(self, *, levels: bool) -> None:
        self.levels = levels
        self._calls = _Calls()

    def draw(self, layer: int) -> float:
        """Where in [0, 1) the shares are looked up for the first chunk of the layer's next call."""
        return self._calls.draw(layer)

    def choose(
        self, chunks: Chunks, shares_SE: npt.NDArray[np.float32], load: Load, layer: int = 0
    ) -> npt.NDArray[np.int64]:
        """See `DispatchPolicy`; `plan` does the same in one call, with all that is around it."""
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
    """By the min-max split of the call (see `eaas.minmax`), which `least_loaded`'s moves then round off.

    Step 1: shares that let the last server end soonest if chunks could be divided. Step 2: the chunks of each
    expert by these shares, evenly. Step 3: as `ByShares` with levelling.
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
        # Of n chunks of an expert the i-th stands for (i, i + 1) / n of its load; where in there is
        # looked up differs from expert to expert and from call to call.
        count_E = np.bincount(expert_C, minlength=experts)
        nth_C = np.arange(expert_C.size) - (np.cumsum(count_E) - count_E)[expert_C]
        draw_C = (self._calls.draw(layer) + expert_C * CHUNK_STEP) % 1.0
        part_C = (nth_C + draw_C) / count_E[expert_C]
        sum_SC = np.cumsum(best_SE[:, expert_C], axis=0)
        # Rounding can leave the sum of an expert's shares a little below 1.
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
    """Any replica, each as likely."""

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
    """The n-th server (from 0) that holds each chunk's expert; NOWHERE where none does."""
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
    """A policy by name. Raises ConfigError naming those that there are."""
    try:
        return _POLICIES[name]()
    except KeyError:
        raise ConfigError(
            f"dispatch policy {name!r} is unknown; choose one of {', '.join(_POLICIES)}"
        ) from None
