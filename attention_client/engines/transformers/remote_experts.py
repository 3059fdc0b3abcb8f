"""Compute a transformers model's routed experts on the expert servers: the one entry of every forward pass.

transformers' experts interface calls it in a pass of its own modules, the operator `eaas::routed_experts` in
a compiled pass, and both micro-batches of an overlapped pass in turns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from attention_client.cluster import Cluster
from attention_client.engines.staging import Staging
from attention_client.engines.transformers.live_rows import LiveRows
from attention_client.engines.transformers.routes import RouteTap
from attention_client.layer_call.turns import micro_batch_tokens, pause
from eaas.errors import GradientError
from eaas.types import ModelShape

__all__ = ["IMPLEMENTATION", "RemoteExperts", "has_gradient", "no_gradients", "remote_experts"]

IMPLEMENTATION = "eaas"
"""Name of the experts' implementation in a transformers configuration."""


class RemoteExperts:
    """Stands for the routed experts of all MoE layers of one model.

    Args:
        cluster: Computes them; None: the model is only exported.
        shape: Model shape.

    Attributes:
        cluster: As given. A first pass without servers replaces it for a while.
        rows: The tokens of a pass that `generate` needs.
        tap: Sees what the routers choose.
    """

    def __init__(self, cluster: Cluster | None, shape: ModelShape) -> None:
        self.cluster: Any = cluster
        self.rows = LiveRows()
        self.tap = RouteTap(shape)
        self._staging = Staging()

    def attach(self, module: Any, layer: int) -> None:
        """Compute the experts of this transformers module, which is the MoE layer `layer`."""
        module._eaas_layer, module._eaas_experts = layer, self

    def routed_experts(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
    ) -> torch.Tensor:
        """Compute the routed experts of tokens in host memory; returns (T, H) there, in their dtype.

        In a micro-batch, lets the other one compute meanwhile. Compiled layer calls take scores in float32
        only. Raises as `LayerCall.finish`.
        """
        part = micro_batch_tokens()
        self.tap.see(layer, ids_TK, part)
        wanted_T = self.rows.wanted(x_TH.shape[0], part)
        if part is None:
            out_TH: torch.Tensor = self.cluster.layer_call(layer, x_TH, ids_TK, scores_TK, wanted_T)
            return out_TH
        with self.cluster.start_layer_call(layer, x_TH, ids_TK, scores_TK, wanted_T) as call:
            pause()
            finished_TH: torch.Tensor = call.finish()
            return finished_TH

    def from_device(
        self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
    ) -> torch.Tensor:
        """Compute the routed experts of tokens on a GPU; returns (T, H) there."""
        staged = self._staging.to_host(x_TH, ids_TK, scores_TK)
        x_TH, ids_TK, scores_TK = staged.tensors
        try:
            return staged.to_device(self.routed_experts(layer, x_TH, ids_TK, scores_TK.float()))
        finally:
            # A failed call and a dry run end here, too.
            staged.drop()


def remote_experts(model: PreTrainedModel) -> RemoteExperts | None:
    """Return what computes the routed experts of a model from `load_model`; None for another model."""
    found = (getattr(module, "_eaas_experts", None) for module in model.modules())
    return next((experts for experts in found if experts is not None), None)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Replace a MoE layer's routed experts in the forward pass.

    Shapes: (T, H), (T, K), (T, K) -> (T, H) in the dtype of hidden_states.
    """
    if torch.compiler.is_exporting():
        scores = top_k_weights.float()
        out: torch.Tensor = torch.ops.eaas.routed_experts(
            hidden_states, top_k_index, scores, self._eaas_layer
        )
        return out
    if has_gradient(hidden_states) or has_gradient(top_k_weights):
        raise no_gradients("the input of an expert layer")
    experts: RemoteExperts = self._eaas_experts
    layer, x_TH, scores_TK = self._eaas_layer, hidden_states.detach(), top_k_weights.detach()
    if not hidden_states.is_cpu:
        return experts.from_device(layer, x_TH, top_k_index, scores_TK)
    return experts.routed_experts(layer, x_TH, top_k_index, scores_TK.float())


ExpertsInterface.register(IMPLEMENTATION, _forward)


def has_gradient(value: object) -> bool:
    """Whether a value is a tensor that the caller differentiates, backward or forward."""
    return isinstance(value, torch.Tensor) and (
        (value.requires_grad and torch.is_grad_enabled())
        or forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]
    )


def no_gradients(what: str) -> GradientError:
    """Return the error for a tensor, `what`, whose gradient would have to pass the experts."""
    return GradientError(
        f"{what} requires a gradient, and none passes through remote experts: call the model under "
        "torch.no_grad(), or remove requires_grad"
    )
