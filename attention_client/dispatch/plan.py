"""From missing pairs to parts, by any policy.

Letters: T tokens, K experts per token, S servers, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attention_client.dispatch import _dispatch
from attention_client.dispatch.parts import (
    CHUNK_PAIRS,
    NOWHERE,
    Part,
    cut,
    group,
    room_for_parts,
    split,
)
from attention_client.dispatch.policies import CHUNK_STEP, ByShares, DispatchPolicy, Load

__all__ = ["plan"]


def plan(
    policy: DispatchPolicy,
    ids_TK: npt.NDArray[np.int64],
    wanted_TK: npt.NDArray[np.bool_],
    shares_SE: npt.NDArray[np.float32],
    load: Load,
    max_tokens: Sequence[int],
    layer: int = 0,
) -> tuple[list[Part], bool]:
    """What each server is to compute of the wanted pairs.

    `group`, the policy and `split`, one after another. For policies that are compiled they are one call,
    since small calls of NumPy take longer than the work.

    Args:
        policy: Chooses.
        ids_TK, wanted_TK: Contiguous.
        shares_SE: As for the policy.
        load: Of the servers.
        max_tokens: As for `split`.
        layer: Whose call it is.

    Returns:
        The parts, as from `split`, and whether every wanted pair is in one.

    Raises:
        IndexError: A wanted expert is not one of E.
    """
    if not isinstance(policy, ByShares):
        chunks = group(ids_TK, wanted_TK, shares_SE.shape[1])
        server_C = policy.choose(chunks, shares_SE, load, layer)
        return split(ids_TK, chunks, server_C, max_tokens), not (server_C == NOWHERE).any()
    servers, experts = shares_SE.shape
    tokens, top_k = ids_TK.shape
    rows_P, ids_PK = room_for_parts(ids_TK, servers)
    rate_S, backlog_S = (load.rate_S, load.backlog_S) if policy.levels else (None, None)
    left, shares = _dispatch.plan(
        ids_TK, wanted_TK, tokens, top_k, shares_SE, servers, experts, CHUNK_PAIRS,
        policy.draw(layer), CHUNK_STEP, rate_S, backlog_S, rows_P, ids_PK,
    )  # fmt: skip
    return cut(shares, rows_P, ids_PK, max_tokens), left == 0
