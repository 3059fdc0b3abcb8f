"""A change of layout in steps that servers have memory for: while one is rolled out they hold both. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from balancer.policies.moves import Move
from balancer.policies.types import Float, Holds, Int, Shares

__all__ = ["stages"]


def stages(
    holds_LSE: Holds,
    shares_LSE: npt.NDArray[np.floating],
    then_LSE: Holds,
    then_shares_LSE: Shares,
    moves: Sequence[Move],
    room_S: Int | None,
) -> list[tuple[Holds, Shares]]:
    """Layouts one after another; the last one is `then`.

    What a stage unloads is there until clients know of it, so a load that needs that room is of the next
    stage. Without limits there is one stage.

    Args:
        holds_LSE, shares_LSE: The layout now.
        then_LSE, then_shares_LSE: The one to come.
        moves: From the one to the other, in a safe order (see `ordered_moves`).
        room_S: int64 (S): replicas that servers have memory for, over all layers.
    """
    if room_S is None:
        return [(then_LSE, then_shares_LSE)]
    found = []
    for stage_LSE in _cut(holds_LSE, moves, room_S):
        if (stage_LSE == then_LSE).all():
            break
        found.append((stage_LSE, _shares(stage_LSE, shares_LSE, then_shares_LSE)))
    return [*found, (then_LSE, then_shares_LSE)]


def _cut(holds_LSE: Holds, moves: Sequence[Move], room_S: Int) -> Iterator[Holds]:
    stage_LSE = holds_LSE.copy()
    # With what is to be unloaded at the end of the stage.
    peak_S = holds_LSE.sum(axis=(0, 2))
    for move in moves:
        is_load = move.kind == "load"
        if is_load and peak_S[move.server] >= room_S[move.server]:
            after_S = stage_LSE.sum(axis=(0, 2))
            if after_S[move.server] < peak_S[move.server]:
                yield stage_LSE.copy()
                peak_S = after_S
        stage_LSE[move.layer, move.server, move.expert] = is_load
        peak_S[move.server] += is_load
    yield stage_LSE


def _shares(stage_LSE: Holds, now_LSE: npt.NDArray[np.floating], then_LSE: Shares) -> Shares:
    """As the layout to come wants it of those that are there; else as now; else even."""
    result: Float = np.zeros(stage_LSE.shape)
    for wanted_LSE in (then_LSE, now_LSE, stage_LSE.astype(np.float64)):
        part_LSE = np.where(stage_LSE, wanted_LSE, 0.0)
        sum_LE = part_LSE.sum(axis=1, keepdims=True)
        missing_LE = (result.sum(axis=1, keepdims=True) == 0) & (sum_LE > 0)
        scaled_LSE = np.divide(part_LSE, sum_LE, out=np.zeros_like(part_LSE), where=sum_LE > 0)
        result = np.where(missing_LE, scaled_LSE, result)
    # A replica without a share is one that nobody asks: it is to have a little.
    least_LSE = np.where(stage_LSE, np.maximum(result, 1 / 1024), 0.0)
    return np.asarray(least_LSE / least_LSE.sum(axis=1, keepdims=True))
