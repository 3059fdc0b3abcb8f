"""The operators by which vLLM's MoE layers call the expert servers.

They are opaque to torch.compile: it sees their shapes and calls them at run time. `start_experts` and
`finish_experts` are one call in two halves; the model computes its shared experts between them.

A worker process holds one model and one membership. The operators take only tensors and numbers, so they find
both in this module.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.utils.torch_utils import direct_register_custom_op

from attention_client.cluster import Cluster
from attention_client.engines.staging import Staged, Staging
from attention_client.layer_call.call import LayerCall
from eaas.errors import ClusterError, ExpertsUnavailableError
from eaas.log import get_logger

__all__ = ["attach", "cluster"]

_log = get_logger(__name__)


class _Attached(NamedTuple):
    cluster: Cluster
    staging: Staging
    patience_s: float


class _Started(NamedTuple):
    """A layer call between its halves."""

    call: LayerCall
    arguments: Any
    staged: Staged


_attached: _Attached | None = None
_started: dict[int, _Started] = {}
_handles = itertools.count(1)
# Micro-batches of vLLM that may be between the halves of a call.
_MOST_STARTED = 8


def attach(cluster: Cluster, patience_s: float) -> None:
    """Set the membership that the operators of this process use.

    Args:
        cluster: The membership.
        patience_s: Longest wait of a call while an expert has no live replica.
    """
    global _attached
    _attached = _Attached(cluster, Staging(), patience_s)


def cluster() -> Cluster:
    """Return the membership of this process. Raises ClusterError before `attach`."""
    return _get().cluster


def _get() -> _Attached:
    if _attached is None:
        raise ClusterError("this vLLM process has not joined a cluster")
    return _attached


# -- tokens ------------------------------------------------------------------------------------------------


class _Tokens(NamedTuple):
    """Tokens of a forward pass that this rank sends.

    Attributes:
        padding_T: bool (T,) on the device: vLLM's padding, which is not sent. None: there is none.
        rank: This rank sends every `ranks`-th token, from `rank` on.
        ranks: Ranks that have the same tokens.
    """

    padding_T: torch.Tensor | None
    rank: int
    ranks: int

    def wanted(self, tokens: int, padding_T: torch.Tensor | None) -> torch.Tensor | None:
        """Return the mask of the tokens to send, bool (T,) on the CPU; None: all. `padding_T`: on the CPU."""
        if padding_T is None and self.ranks == 1:
            return None
        wanted_T = torch.arange(tokens) % self.ranks == self.rank
        return wanted_T if padding_T is None else wanted_T & ~padding_T


_ALL = _Tokens(None, 0, 1)


def _tokens(x: torch.Tensor, rank: int, ranks: int) -> _Tokens | None:
    """Return which tokens this rank sends: its share, without vLLM's padding. None: nothing is sent.

    vLLM runs the model without attention metadata to measure memory, to capture graphs and where a
    data-parallel rank has no request.
    """
    padding_T = None
    if is_forward_context_available():
        context = get_forward_context()
        if not context.attn_metadata:
            return None
        padding_T = context.is_padding
    if padding_T is None:
        return _ALL if ranks == 1 else _Tokens(None, rank, ranks)
    return _Tokens(padding_T[: x.shape[0]], rank, ranks)


def _stage(
    staging: Staging,
    tokens: _Tokens,
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    layer: int,
) -> tuple[Staged, Any]:
    """Bring the tensors of a call to the host; return them and the arguments of the layer call."""
    if tokens.padding_T is None:
        staged = staging.to_host(x, ids, scores)
        padding_T = None
    else:
        staged = staging.to_host(x, ids, scores, tokens.padding_T)
        padding_T = staged.tensors[3]
    return staged, (layer, *staged.tensors[:3], tokens.wanted(x.shape[0], padding_T))


# -- operators ---------------------------------------------------------------------------------------------


def _experts(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, layer: int, rank: int, ranks: int
) -> torch.Tensor:
    tokens = _tokens(x, rank, ranks)
    if tokens is None:
        return torch.zeros_like(x)
    attached = _get()
    if tokens is _ALL and x.is_cpu:
        return _call(attached, (layer, x, ids, scores, None))
    staged, arguments = _stage(attached.staging, tokens, x, ids, scores, layer)
    return staged.to_device(_call(attached, arguments))


def _start_experts(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, layer: int, rank: int, ranks: int
) -> torch.Tensor:
    handle = next(_handles)
    tokens = _tokens(x, rank, ranks)
    if tokens is not None:
        attached = _get()
        if len(_started) >= _MOST_STARTED:
            # Of a forward pass that failed between the halves.
            left = _started.pop(next(iter(_started)))
            left.call.cancel()
            left.staged.drop()
        staged, arguments = _stage(attached.staging, tokens, x, ids, scores, layer)
        call = attached.cluster.start_layer_call(*arguments)
        _started[handle] = _Started(call, arguments, staged)
    return torch.tensor([handle])


def _finish_experts(
    handle: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    started = _started.pop(int(handle), None)
    if started is None:
        return torch.zeros_like(x)
    attached = _get()
    try:
        out = started.call.finish()
    except ExpertsUnavailableError as error:
        out = _wait(attached, started.arguments, error)
    return started.staged.to_device(out)


def _call(attached: _Attached, arguments: Any) -> torch.Tensor:
    try:
        return attached.cluster.layer_call(*arguments)
    except ExpertsUnavailableError as error:
        return _wait(attached, arguments, error)


def _wait(attached: _Attached, arguments: Any, error: ExpertsUnavailableError) -> torch.Tensor:
    """Repeat a layer call that failed, until it succeeds or the patience is over.

    An error in a forward pass ends vLLM's engine with every request in it, so it is worth waiting.
    """
    until = time.monotonic() + attached.patience_s
    while time.monotonic() < until:
        _log.warning("a batch waits for experts: %s", error)
        try:
            return attached.cluster.layer_call(*arguments)
        except ExpertsUnavailableError as again:
            error = again
    raise error


def _experts_fake(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, layer: int, rank: int, ranks: int
) -> torch.Tensor:
    return torch.empty_like(x)


def _start_experts_fake(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, layer: int, rank: int, ranks: int
) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _finish_experts_fake(
    handle: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(x)


_library = torch.library.Library("eaas", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _run, _fake in (
    ("experts", _experts, _experts_fake),
    ("start_experts", _start_experts, _start_experts_fake),
    ("finish_experts", _finish_experts, _finish_experts_fake),
):
    direct_register_custom_op(_name, _run, fake_impl=_fake, target_lib=_library)
