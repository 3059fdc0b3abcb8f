"""PAR where clients split each batch over the replicas, whatever the plan's shares say."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["split_par"]


def split_par(
    counts_IE: npt.NDArray[np.generic], shares_SE: npt.NDArray[np.float64]
) -> npt.NDArray[np.float32]:
    """float32 (I)."""
    raise NotImplementedError
