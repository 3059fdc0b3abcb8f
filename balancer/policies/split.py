"""The best split of each batch over a placement that stays as it is.

    fullness   a server's load (with what it has still to do) over its speed
    level      fullness of the fullest server, with the split that makes it lowest

The min-max split is a max-flow: from experts with their loads to servers that hold them. It is found
exactly, by Newton's iteration on the level (W. Dinkelbach 1967) over E. Dinic's max-flow (1970), starting
at the shares of the plan. The compiled core is `eaas.minmax`, where attention clients find it, too.
Shape suffixes: B batches, S servers, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eaas.minmax import levels_of, split_of

__all__ = ["levels", "split"]

Float = npt.NDArray[np.float64]


def split(
    load_E: npt.ArrayLike,
    shares_SE: npt.ArrayLike,
    speeds_S: npt.ArrayLike | None = None,
    backlog_S: npt.ArrayLike | None = None,
) -> Float:
    """The shares for one batch.

    Args:
        load_E: (E,) the batch's tokens of each expert, at least 0.
        shares_SE: (S, E) the plan's shares, or bool; above 0 where a replica is.
        speeds_S: (S,) above 0; all 1 by default.
        backlog_S: (S,) load that servers have already. With it the servers below the fullest are levelled,
            too (within 1 %), as the fullest may be one that this batch has nothing for.

    Returns:
        float64 (S, E): of each expert that has a replica they sum to 1; those without load keep the plan's.

    Raises:
        ValueError: An argument is wrong; the message names it.

    Time about O(S * E / 8 + replicas * rounds), some tens of microseconds for 64 x 256.
    """
    return split_of(load_E, shares_SE, speeds_S, backlog_S)[0]


def levels(
    load_BE: npt.ArrayLike, shares_SE: npt.ArrayLike, speeds_S: npt.ArrayLike | None = None
) -> Float:
    """float64 (B): the level of each batch, if every batch is split anew.

    Over load_BE.sum(axis=1) / speeds_S.sum() it is the batch's PAR. The arguments are those of `split`,
    with (B, E) loads; the GIL is released.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """
    return levels_of(load_BE, shares_SE, speeds_S)
