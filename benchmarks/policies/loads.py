"""Loads to plan for, the same in every process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.policies.sizes import Size

__all__ = ["loads"]

# Spread of the experts' log-normal popularity (a few at ten times the mean); its change for the second plan.
_SIGMA, _CHANGE = 1.0, 0.3

Float = npt.NDArray[np.float64]


def loads(size: Size) -> tuple[Float, Float]:
    """float64 (L, E) twice: the load of the first plan, and that of the plan after it."""
    rng = np.random.default_rng(0)
    load_LE = 1e4 * rng.lognormal(0, _SIGMA, (size.layers, size.experts))
    return load_LE, load_LE * rng.lognormal(0, _CHANGE, load_LE.shape)
