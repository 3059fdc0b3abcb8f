"""The sum of the results of a layer call's parts.

Shape suffixes: T tokens, R tokens of a part, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention_client.dispatch import _dispatch
from attention_client.dispatch.parts import Part

__all__ = ["combine"]

Results = Sequence[tuple[Part, npt.NDArray[np.float32]]]


def combine(shape_TH: tuple[int, int], results: Results) -> torch.Tensor:
    """Sum the servers' results (R, H) of all parts of a layer call, in an order independent of their arrival.

    Returns:
        float32 (T, H); 0 for a token without a part.
    """
    out_TH: npt.NDArray[np.float32] = np.empty(shape_TH, np.float32)
    ordered = _ordered(results)
    _dispatch.combine(
        out_TH,
        *shape_TH,
        [result_RH for _, result_RH in ordered],
        [part.rows_R for part, _ in ordered],
    )
    return torch.from_numpy(out_TH)


def _ordered(results: Results) -> Results:
    """Sort results by server and first token, and by experts if two parts share both (after a failover)."""
    firsts = {(part.server, part.rows_R.item(0)) for part, _ in results}
    if len(firsts) < len(results):
        results = sorted(results, key=lambda result: result[0].ids_RK.tobytes())
    return sorted(results, key=lambda result: (result[0].server, result[0].rows_R.item(0)))
