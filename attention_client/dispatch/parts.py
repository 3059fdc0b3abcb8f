"""Split a layer call into parts for servers, and combine their results: pure functions over arrays.

Glossary: a *pair* is one (token, expert) of a layer call; a *chunk* is a group of pairs of one expert that go
to one replica, which reads the expert's weights once; a *part* is the work of one server.
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

__all__ = [
    "CHUNK_PAIRS",
    "NOWHERE",
    "Chunks",
    "Part",
    "combine",
    "cut",
    "group",
    "pairs_of",
    "room_for_parts",
    "split",
    "without",
]

NOWHERE = -1
"""The server of a chunk that has no usable replica."""

CHUNK_PAIRS = 64
"""Pairs of an expert whose computation takes about as long as reading its weights."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a layer call.

    Attributes:
        of_TK: int32, chunk of each pair; -1 if the pair is not wanted.
        expert_C: int64, expert of each chunk, ascending.
        work_C: float64, cost of each chunk: 1 for reading the weights plus 1 per `CHUNK_PAIRS` pairs.
    """

    of_TK: npt.NDArray[np.int32]
    expert_C: npt.NDArray[np.int64]
    work_C: npt.NDArray[np.float64]


@dataclass(eq=False, slots=True)
class Part:
    """The work of one server in a layer call.

    Attributes:
        server: Index of the server in the placement.
        rows_R: int64, tokens, ascending.
        ids_RK: int32, experts of these tokens; -1 if the pair belongs to another server.
        work: Cost of its chunks (see `Chunks`).
    """

    server: int
    rows_R: npt.NDArray[np.int64]
    ids_RK: npt.NDArray[np.int32]
    work: float

    @property
    def pairs_RK(self) -> npt.NDArray[np.bool_]:
        """Pairs of this part: bool (R, K)."""
        return self.ids_RK >= 0


def group(
    ids_TK: npt.NDArray[np.int64],
    wanted_TK: npt.NDArray[np.bool_],
    num_experts: int,
    chunk_pairs: int = CHUNK_PAIRS,
) -> Chunks:
    """Group the wanted pairs of each expert into even chunks of at most `chunk_pairs`.

    Raises:
        IndexError: A wanted expert is outside `num_experts`.
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
    """Make the parts: each token goes to a server once, with all its experts there.

    Args:
        ids_TK: Logical expert of each pair.
        chunks: From `group`.
        server_C: From a `DispatchPolicy`; NOWHERE leaves a chunk out.
        max_tokens: Tokens that fit into one slot of each server; larger parts are cut.

    Returns:
        The parts, by ascending server and token.
    """
    servers, (tokens, top_k) = len(max_tokens), ids_TK.shape
    count_S = np.empty(servers, dtype=np.int64)
    rows_P, ids_PK = room_for_parts(ids_TK, servers)
    _dispatch.split(
        ids_TK, chunks.of_TK, tokens, top_k, server_C, server_C.size,
        count_S, rows_P, ids_PK, servers,
    )  # fmt: skip
    return cut(
        [
            (server, rows, float(chunks.work_C[server_C == server].sum()))
            for server, rows in enumerate(count_S.tolist())
            if rows
        ],
        rows_P,
        ids_PK,
        max_tokens,
    )


def room_for_parts(
    ids_TK: npt.NDArray[np.int64], servers: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Allocate rows and experts of all parts: a token is in at most min(K, S) parts."""
    tokens, top_k = ids_TK.shape
    most = tokens * min(servers, top_k)
    return np.empty(most, np.int64), np.empty((most, top_k), np.int32)


def cut(
    shares: Sequence[tuple[int, int, float]],
    rows_P: npt.NDArray[np.int64],
    ids_PK: npt.NDArray[np.int32],
    max_tokens: Sequence[int],
) -> list[Part]:
    """Cut the work of servers into parts that fit into a slot.

    Args:
        shares: (server, tokens, work), by ascending server.
        rows_P, ids_PK: Tokens and their experts, server by server.
        max_tokens: As for `split`.
    """
    parts = []
    start = 0
    for server, rows, work in shares:
        step, stop = max_tokens[server], start + rows
        while start < stop:
            end = min(start + step, stop)
            share = work * (end - start) / rows
            parts.append(Part(server, rows_P[start:end], ids_PK[start:end], share))
            start = end
    return parts


def combine(
    shape_TH: tuple[int, int], results: Sequence[tuple[Part, npt.NDArray[np.float32]]]
) -> torch.Tensor:
    """Sum the results (R, H) of all parts, in an order independent of their arrival.

    Returns:
        float32 (T, H); 0 for a token without a part.
    """
    tokens, hidden = shape_TH
    out_TH: npt.NDArray[np.float32] = np.empty(shape_TH, np.float32)
    ordered = _ordered(results)
    _dispatch.combine(
        out_TH,
        tokens,
        hidden,
        [result_RH for _, result_RH in ordered],
        [part.rows_R for part, _ in ordered],
    )
    return torch.from_numpy(out_TH)


def without(pairs_TK: npt.NDArray[np.bool_], parts: Sequence[Part]) -> npt.NDArray[np.bool_] | None:
    """Pairs outside these parts; None if there are none."""
    left_TK = pairs_TK.copy()
    for part in parts:
        left_TK[part.rows_R] &= ~part.pairs_RK
    return left_TK if left_TK.any() else None


def pairs_of(part: Part, shape_TK: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """The pairs of a part as a mask over the call: bool (T, K)."""
    pairs_TK = np.zeros(shape_TK, dtype=np.bool_)
    pairs_TK[part.rows_R] = part.pairs_RK
    return pairs_TK


_Results = Sequence[tuple[Part, npt.NDArray[np.float32]]]


def _ordered(results: _Results) -> _Results:
    """Sort by server and first token; after a failover by experts too, since two parts may share both."""
    if len(results) == 1:
        return results
    firsts = {(part.server, part.rows_R.item(0)) for part, _ in results}
    return sorted(results, key=_order if len(firsts) == len(results) else _order_of_any)


def _order(result: tuple[Part, npt.NDArray[np.float32]]) -> tuple[int, int]:
    part = result[0]
    return part.server, part.rows_R.item(0)


def _order_of_any(result: tuple[Part, npt.NDArray[np.float32]]) -> tuple[int, int, bytes]:
    return *_order(result), result[0].ids_RK.tobytes()
