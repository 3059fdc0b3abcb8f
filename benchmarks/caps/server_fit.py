"""Fits `ServerCost`, the time of an expert server's step, to measurements by `eaas bench experts`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaas.errors import ConfigError

__all__ = ["ServerFit", "Step", "fit_steps", "read_fits"]

_LEAST_SIZES = 3


@dataclass(frozen=True)
class Step:
    """A measured call of an expert kernel.

    Attributes:
        pairs: Number of token-expert pairs.
    """

    active: float
    pairs: float
    seconds: float


@dataclass(frozen=True)
class ServerFit:
    """The model fixed_s + max(load_s x active, pair_s x pairs), in seconds, and its error.

    Attributes:
        fixed_s, load_s, pair_s: See `attention_client.scheduler.cost.ServerCost`.
        worst_error: Largest relative error over the measured calls.
    """

    fixed_s: float
    load_s: float
    pair_s: float
    worst_error: float


def fit_steps(steps: Sequence[Step]) -> ServerFit:
    """Fit a model to measured calls: non-negative least squares of the relative errors.

    Tries each split of the calls into those bound by weights and those bound by pairs.
    """
    by_pairs = sorted(steps, key=lambda step: step.pairs)
    fits = [_fit(by_pairs, loads) for loads in range(len(by_pairs) + 1)]
    return min(fits, key=lambda fit: fit.worst_error)


def read_fits(path: Path) -> list[tuple[dict[str, str], ServerFit]]:
    """Fit each shape, dtype and kernel in a document of `eaas bench experts --json`.

    Raises ConfigError: the file is not such a document, or has too few batch sizes.
    """
    try:
        document = json.loads(path.read_text())
        groups: dict[tuple[str, str, str], list[Step]] = {}
        # A row of `auto` repeats one of a kernel.
        for row in (row for row in document["rows"] if "picked" not in row):
            key = (row["shape"], row["dtype"], row["kernel"])
            groups.setdefault(key, []).append(_step(row))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no document of `eaas bench experts --json` ({type(error).__name__}: {error})"
        ) from error
    if not groups or min(map(len, groups.values())) < _LEAST_SIZES:
        raise ConfigError(f"{path}: a fit takes at least {_LEAST_SIZES} batch sizes (--tokens)")
    return [
        ({"shape": shape, "dtype": dtype, "kernel": kernel}, fit_steps(steps))
        for (shape, dtype, kernel), steps in groups.items()
    ]


def _step(row: dict[str, Any]) -> Step:
    """Convert a row of the document to a call. Each token went to top-k experts, all equally likely."""
    _, _, experts, top_k = (int(word) for word in row["shape"].split(","))
    active = experts * (1 - (1 - top_k / experts) ** row["tokens"])
    return Step(active, row["tokens"] * top_k, row["ms"] / 1e3)


def _fit(by_pairs: Sequence[Step], loads: int) -> ServerFit:
    """Fit the model, with the first `loads` calls bound by weights and the others by pairs."""
    terms = np.array(
        [
            (1.0, step.active, 0.0) if place < loads else (1.0, 0.0, step.pairs)
            for place, step in enumerate(by_pairs)
        ]
    )
    seconds = np.array([step.seconds for step in by_pairs])
    used = [column for column in range(3) if terms[:, column].any()]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used] / seconds[:, None], np.ones(len(seconds)))
        if not (found < 0).any():
            break
        del used[int(found.argmin())]
    fixed_s, load_s, pair_s = np.bincount(used, found, minlength=3).tolist()
    errors = [
        abs(fixed_s + max(load_s * step.active, pair_s * step.pairs) - step.seconds) / step.seconds
        for step in by_pairs
    ]
    return ServerFit(fixed_s, load_s, pair_s, max(errors))
