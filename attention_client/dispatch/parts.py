"""From what a router chose to what each server is to compute: pure functions over arrays.

Words: a *pair* is one (token, expert) of a layer call; a *chunk* is some pairs of one expert that stay
together, since a replica reads the expert's weights once however many tokens it has; a *part* is what one
server is to compute.
Shape suffixes: T tokens, K experts per token, C chunks, S servers, E logical experts, R tokens of a part,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from attention_client.dispatch import _dispatch

__all__ = ["CHUNK_PAIRS", "NOWHERE", "Chunks", "Part", "combine", "group", "split"]

NOWHERE = -1
"""The server of a chunk that has no usable replica."""

CHUNK_PAIRS = 64
"""Pairs of an expert from which on computing them takes longer than reading its weights, roughly."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The pieces of a layer call that are not divided among servers.

    Attributes:
        of_TK: int32, the chunk of each pair; -1 where the pair is not wanted.
        expert_C: int64, the expert of each chunk, ascending.
        work_C: float64, what a chunk costs: 1 for reading the expert's weights and 1 for every
            `CHUNK_PAIRS` pairs.
    """

    of_TK: npt.NDArray[np.int32]
    expert_C: npt.NDArray[np.int64]
    work_C: npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Part:
    """What one server is to compute of a layer call.

    Attributes:
        server: Index of the server in the placement.
        rows_R: int64, the tokens concerned, ascending.
        ids_RK: int32, their experts; -1 where the pair is not this server's.
        work: Of its chunks (see `Chunks`).
    """

    server: int
    rows_R: npt.NDArray[np.int64]
    ids_RK: npt.NDArray[np.int32]
    work: float

    @property
    def pairs_RK(self) -> npt.NDArray[np.bool_]:
        """Which experts of those tokens are this server's."""
        return self.ids_RK >= 0


def group(
    ids_TK: npt.NDArray[np.int64],
    wanted_TK: npt.NDArray[np.bool_],
    num_experts: int,
    chunk_pairs: int = CHUNK_PAIRS,
) -> Chunks:
    """Gather the wanted pairs of each expert into chunks of `chunk_pairs` at most, as even as they can be.

    Raises:
        IndexError: A wanted expert is not one of `num_experts`.
    """
    of_TK = np.empty(ids_TK.shape, dtype=np.int32)
    expert_P = np.empty(ids_TK.size, dtype=np.int64)
    pairs_P = np.empty(ids_TK.size, dtype=np.int64)
    count = _dispatch.group(
        ids_TK, wanted_TK, ids_TK.size, num_experts, chunk_pairs, of_TK, expert_P, pairs_P
    )
    return Chunks(of_TK, expert_P[:count], 1.0 + pairs_P[:count] / chunk_pairs)


def split(
    ids_TK: npt.NDArray[np.int64],
    chunks: Chunks,
    server_C: npt.NDArray[np.int64],
    max_tokens: Sequence[int],
) -> list[Part]:
    """Make the parts: a token goes to a server once, with all its experts there.

    Args:
        ids_TK: Logical expert of each pair.
        chunks: From `group`.
        server_C: From a `DispatchPolicy`; NOWHERE leaves the pairs of a chunk out.
        max_tokens: Tokens that one slot of each server takes; a part that is larger is cut.

    Returns:
        The parts in ascending order of server and token.
    """
    servers, (tokens, top_k) = len(max_tokens), ids_TK.shape
    count_S = np.empty(servers, dtype=np.int64)
    rows_ST = np.empty((servers, tokens), dtype=np.int64)
    ids_STK = np.empty((servers, tokens, top_k), dtype=np.int32)
    _dispatch.split(
        ids_TK, chunks.of_TK, tokens, top_k, server_C, server_C.size,
        count_S, rows_ST, ids_STK, servers,
    )  # fmt: skip
    parts = []
    for server, rows in enumerate(count_S.tolist()):
        if not rows:
            continue
        work = float(chunks.work_C[server_C == server].sum())
        step = max_tokens[server]
        for start in range(0, rows, step):
            end = min(start + step, rows)
            parts.append(
                Part(
                    server,
                    rows_ST[server, start:end],
                    ids_STK[server, start:end],
                    work * (end - start) / rows,
                )
            )
    return parts


def combine(
    shape_TH: tuple[int, int], results: Sequence[tuple[Part, npt.NDArray[np.float32]]]
) -> torch.Tensor:
    """The sum of all parts' results (R, H), in an order that does not depend on when they came.

    Returns:
        float32 (T, H); a token that is in no part is 0.
    """
    tokens, hidden = shape_TH
    out_TH = torch.empty(shape_TH, dtype=torch.float32)
    ordered = sorted(results, key=_order)
    _dispatch.combine(
        out_TH.numpy(),
        tokens,
        hidden,
        [result_RH for _, result_RH in ordered],
        [part.rows_R for part, _ in ordered],
    )
    return out_TH


def _order(result: tuple[Part, npt.NDArray[np.float32]]) -> tuple[int, int, bytes]:
    part = result[0]
    return part.server, int(part.rows_R[0]), part.ids_RK.tobytes()
