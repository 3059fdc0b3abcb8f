"""Covering arrays: few combinations of options that have each pair of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

__all__ = ["all_pairs"]


def all_pairs(
    options: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Return allowed combinations, so that each pair of options that any of them has is in one; greedily.

    The first ones have the most pairs.
    """
    every = [dict(zip(options, each, strict=True)) for each in product(*options.values())]
    pairs = [(each, set(combinations(each.items(), 2))) for each in every if allowed(each)]
    missing = set().union(*(of for _, of in pairs))
    found = []
    while missing:
        best, of = max(pairs, key=lambda pair: len(pair[1] & missing))
        found.append(best)
        missing -= of
    return found
