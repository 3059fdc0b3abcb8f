"""Perplexity and ratios of perplexities, from the losses of windows of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

__all__ = ["Losses", "perplexity", "ratio"]

Losses = Mapping[str, Sequence[float]]
"""Text -> mean loss (nats a token) of each of its windows, which are of equal length."""


def perplexity(losses: Losses) -> float:
    """Return exp of the mean loss over all windows."""
    return math.exp(fmean(_windows(losses)))


def ratio(losses: Losses, baseline: Losses) -> tuple[float, float]:
    """Return the ratio of two perplexities on the same windows, and its standard error.

    The windows' differences are the samples: that some windows are harder than others does not count.
    """
    differences = [a - b for a, b in zip(_windows(losses), _windows(baseline), strict=True)]
    found = math.exp(fmean(differences))
    if len(differences) < 2:
        return found, math.inf
    return found, found * stdev(differences) / math.sqrt(len(differences))


def _windows(losses: Losses) -> list[float]:
    return [loss for windows in losses.values() for loss in windows]
