"""Gating, as a model does it: turns a router's logits into each token's experts and weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["combine", "route_grouped", "route_topk", "softmax"]

Float = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def softmax(logits_TE: npt.ArrayLike) -> Float:
    """float64 (T, E): softmax over experts, each row sums to 1; safe for logits of any size."""
    logits = np.asarray(logits_TE, np.float64)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def route_topk(
    logits_TE: npt.ArrayLike, top_k: int, *, renormalize: bool = True
) -> tuple[Ids, Float]:
    """Route by softmax over all experts, then the K highest (Shazeer et al. 2017; Mixtral, Qwen-MoE).

    Args:
        logits_TE: (T, E).
        top_k: K.
        renormalize: Scale the kept weights of a token to sum to 1, so that its result is a convex
            combination of the experts' outputs. Otherwise they sum to less than 1 unless K = E.

    Returns:
        ids_TK: int64 (T, K), by falling weight; of equal weights the lower id comes first.
        weights_TK: float64 (T, K).

    Raises:
        ValueError: top_k is not in 1..E.
    """
    gates_TE = softmax(logits_TE)
    ids_TK = _highest(gates_TE, top_k)
    weights_TK = np.take_along_axis(gates_TE, ids_TK, axis=1)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(axis=1, keepdims=True)
    return ids_TK, weights_TK


def route_grouped(
    logits_TE: npt.ArrayLike,
    bias_E: npt.ArrayLike,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    renormalize: bool = True,
) -> tuple[Ids, Float]:
    """Route by sigmoid affinities with a bias, within a token's best groups (DeepSeek-V3, section 2.1.2).

    The bias evens out the load without an auxiliary loss; it affects the choice of experts, not their
    weights. A group's score is the sum of its two best experts' scores.

    Args:
        logits_TE: (T, E).
        bias_E: (E).
        top_k: K.
        groups: Equal parts of the experts, in the order of their ids (DeepSeek-V3: 8).
        top_groups: Groups that a token may use (DeepSeek-V3: 4).
        scale: Factor on the weights, after renormalisation (DeepSeek-V3: 2.5).
        renormalize: Scale the kept affinities to sum to 1.

    Returns:
        ids_TK: int64 (T, K), by falling biased affinity; of equal ones the lower id comes first.
        weights_TK: float64 (T, K).

    Raises:
        ValueError: groups does not divide E, top_groups is not in 1..groups, or top_k is not in 1..the
            experts of top_groups groups.
    """
    logits = np.asarray(logits_TE, np.float64)
    tokens, experts = logits.shape
    if groups < 1 or experts % groups:
        raise ValueError(f"groups: {groups} do not divide {experts} experts")
    if not 1 <= top_groups <= groups:
        raise ValueError(f"top_groups: {top_groups} of {groups} groups")
    size = experts // groups
    # This form of the sigmoid does not overflow.
    affinity_TE = 0.5 * (1.0 + np.tanh(0.5 * logits))
    choice_TE = affinity_TE + np.asarray(bias_E, np.float64)
    by_group = choice_TE.reshape(tokens, groups, size)
    worth_TG = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
    allowed_TG = np.zeros((tokens, groups), np.bool_)
    np.put_along_axis(allowed_TG, _highest(worth_TG, top_groups), True, axis=1)
    if top_k > top_groups * size:
        raise ValueError(
            f"top_k: {top_k} of the {top_groups * size} experts in {top_groups} groups"
        )
    masked_TE = np.where(np.repeat(allowed_TG, size, axis=1), choice_TE, -np.inf)
    ids_TK = _highest(masked_TE, top_k)
    weights_TK = np.take_along_axis(affinity_TE, ids_TK, axis=1)
    if renormalize:
        weights_TK = weights_TK / (weights_TK.sum(axis=1, keepdims=True) + 1e-20)
    return ids_TK, weights_TK * scale


def combine(rows_ETH: npt.ArrayLike, ids_TK: Ids, weights_TK: Float) -> Float:
    """Compute the routed part of a layer's result, each token's weighted sum of outputs: float64 (T, H).

    Args:
        rows_ETH: Output of each expert for each token: (E, T, H).
        ids_TK, weights_TK: Result of `route_topk` or `route_grouped`.
    """
    rows = np.asarray(rows_ETH, np.float64)
    picked_TKH = rows[ids_TK, np.arange(len(ids_TK))[:, None]]
    return np.asarray(np.einsum("tk,tkh->th", weights_TK, picked_TKH))


def _highest(values_TE: Float, count: int) -> Ids:
    """int64 (T, count): columns of each row's highest values; of equal values the first columns."""
    columns = values_TE.shape[1]
    if not 1 <= count <= columns:
        raise ValueError(f"top_k: {count} of {columns} experts")
    return np.asarray(np.argsort(-values_TE, axis=1, kind="stable")[:, :count])
