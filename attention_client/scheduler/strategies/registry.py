"""Registry of the selection strategies by name, including those of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from attention_client.scheduler.strategies.base import SelectionStrategy
from attention_client.scheduler.strategies.cost_bounded import CostBounded
from attention_client.scheduler.strategies.differencing import Differencing, KarmarkarKarp
from attention_client.scheduler.strategies.fcfs import Fcfs, Random
from attention_client.scheduler.strategies.greedy import (
    BestFit,
    GreedyDotProduct,
    GreedyVariance,
    NormMinimizing,
    PowerOfD,
    PowerOfDDot,
)
from attention_client.scheduler.strategies.lpt import Lpt, LptBalanced
from eaas.errors import ConfigError

__all__ = ["GROUP", "SEED", "strategy", "strategy_names"]

GROUP = "eaas.strategies"

_CLASSES: tuple[type[SelectionStrategy], ...] = (
    Fcfs,
    Random,
    Lpt,
    LptBalanced,
    KarmarkarKarp,
    Differencing,
    GreedyVariance,
    GreedyDotProduct,
    NormMinimizing,
    BestFit,
    PowerOfD,
    PowerOfDDot,
    CostBounded,
)
_OURS: dict[str, type[SelectionStrategy]] = {each.name: each for each in _CLASSES}

# The twelve strategies of the CAPS paper.
SEED = tuple(name for name in _OURS if name != CostBounded.name)


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies: built-in ones first, then those of other packages."""
    return (*_OURS, *sorted(_others()))


def strategy(name: str) -> SelectionStrategy:
    """Make the selection strategy that a config or command names.

    Raises:
        ConfigError: The name is unknown, or its package cannot be used.
    """
    if name in _OURS:
        return _OURS[name]()
    others = _others()
    if name not in others:
        raise ConfigError(
            f"strategy {name!r} is unknown: choose one of {', '.join(strategy_names())}"
        )
    return _load(others[name])


def _others() -> dict[str, EntryPoint]:
    """Return the strategies of other packages by name. They cannot replace a built-in name."""
    return {found.name: found for found in entry_points(group=GROUP) if found.name not in _OURS}


def _load(found: EntryPoint) -> SelectionStrategy:
    try:
        loaded = found.load()
        made = loaded()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"strategy {found.name!r} ({found.value}): {error}") from error
    if not isinstance(made, SelectionStrategy):
        raise ConfigError(
            f"strategy {found.name!r} ({found.value}) is no subclass of "
            f"{SelectionStrategy.__module__}.{SelectionStrategy.__qualname__}"
        )
    return made
