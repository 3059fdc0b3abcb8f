"""Assign missing pairs to servers with any dispatch policy.

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
    """Make the parts of the wanted pairs: `group`, then the policy, then `split`.

    For compiled policies this is one C call, because small NumPy calls take longer than the work.

    Args:
        policy: Chooses replicas.
        ids_TK, wanted_TK: Contiguous.
        shares_SE: As for the policy.
        load: Load of the servers.
        max_tokens: As for `split`.
        layer: Layer of the call.

    Returns:
        The parts, as from `split`, and whether they hold every wanted pair.

    Raises:
        IndexError: A wanted expert is outside E.
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
