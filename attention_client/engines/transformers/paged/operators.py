"""The operators by which a forward pass reaches what is not in it: cache, servers, own products, rotary code.

They are opaque to torch.export, which sees only their shapes. A thread that runs a pass says what they reach
(`reaching`); they take only tensors and numbers. No exception can go through a compiled pass: after an error
the rest of the pass computes with zeros, and `reaching` raises the error.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_client.engines.transformers.paged.latent import latent_heads
from attention_client.engines.transformers.paged.sequences import Sequences

__all__ = ["ATTENTION", "Outside", "reaching"]

ATTENTION = "eaas_flash"
"""Name of the attention in transformers. It builds masks and index lists unless the name has "flash"."""


class Outside(Protocol):
    """What a forward pass reaches."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        sequences: Sequences | None = None,
    ) -> torch.Tensor:
        """Attend to the sequences: (1, heads, T, D) and (1, kv_heads, T, D or V) -> (1, T, heads, V).

        `_paged.attend` describes the arguments. `sequences` are those of the pass, unless given.
        """

    def routed_experts(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
    ) -> torch.Tensor:
        """Compute the routed experts of a MoE layer: (T, H) in the dtype of x."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute F.linear in bfloat16: (.., I), (O, I), (O) -> (.., O); see `dense`."""

    def rotary(
        self, positions: torch.Tensor, place: int, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute cosines and sines of a rotary module: (1, T) -> float32 (1, T, D); see `rotary.py`."""


class _Current(threading.local):
    outside: Outside | None = None
    error: BaseException | None = None


_current = _Current()


@contextlib.contextmanager
def reaching(outside: Outside) -> Iterator[None]:
    """Let the operators of this thread reach `outside` inside the block; raise their error at its end."""
    _current.outside, _current.error = outside, None
    try:
        yield
        if _current.error is not None:
            raise _current.error
    finally:
        _current.outside = _current.error = None


def _outside() -> Outside:
    if _current.outside is None:
        raise RuntimeError("this operator runs only in a forward pass of the engine")
    return _current.outside


# -- operators ---------------------------------------------------------------------------------------------


def _paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    return _outside().attend(layer, q, k, v, scale, softcap, sinks)


def _attended(q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _routed_experts(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, layer: int
) -> torch.Tensor:
    return _outside().routed_experts(layer, x, ids, scores)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _outside().linear(x, weight, bias)


def _multiplied(x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _rotary(
    positions: torch.Tensor, place: int, layer_type: str, _width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outside().rotary(positions, place, layer_type)


def _rotated(
    positions: torch.Tensor, _place: int, _layer_type: str, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    made = positions.new_empty(*positions.shape, width, dtype=torch.float32)
    return made, torch.empty_like(made)


def _define(signature: str, run: Callable[..., Any], empty: Callable[..., Any]) -> None:
    """Define an operator that runs `run`; `empty` makes its results for tracing and after an error."""

    def guarded(*arguments: Any) -> Any:
        if _current.error is None:
            try:
                return run(*arguments)
            except BaseException as error:  # noqa: BLE001 (`reaching` raises it)
                _current.error = error
        return tree_map(torch.zero_, empty(*arguments))

    name = signature.partition("(")[0]
    _library.define(signature)  # type: ignore[no-untyped-call]
    _library.impl(name, guarded, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"eaas::{name}", empty, lib=_library)


_library = torch.library.Library("eaas", "FRAGMENT")  # type: ignore[no-untyped-call]
_define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer, float scale, "
    "float softcap) -> Tensor",
    _paged_attention,
    _attended,
)
_define(
    "routed_experts(Tensor x, Tensor ids, Tensor scores, int layer) -> Tensor",
    _routed_experts,
    lambda x, *_: torch.empty_like(x),
)
_define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _multiplied)
_define(
    "rotary(Tensor positions, int place, str layer_type, int width) -> (Tensor, Tensor)",
    _rotary,
    _rotated,
)


# -- transformers' attention interface ---------------------------------------------------------------------


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sequences: Sequences | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if position_bias is not None:
        raise ValueError("its attention adds a bias to the scores")
    if attention_mask is not None:
        raise ValueError("its attention makes masks of its own")
    layer = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = latent_heads(module)
    if heads is not None:
        query = heads.queries(query)
    sinks = None if s_aux is None else s_aux.float()
    softcap = softcap or 0.0
    if sequences is not None:
        # Of a micro-batch, or of a pass in transformers' modules.
        out = _outside().attend(layer, query, key, value, scale, softcap, sinks, sequences)
    else:
        out = torch.ops.eaas.paged_attention(query, key, value, sinks, layer, scale, softcap)
    return out if heads is None else heads.values(out), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: the attention knows the sequences."""


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _no_mask)
