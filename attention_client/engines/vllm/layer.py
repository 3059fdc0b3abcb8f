"""vLLM's `RoutedExperts` without weights: its method asks the cluster's expert servers.

vLLM builds one `RoutedExperts` for each MoE layer and asks it for a quantisation method, which makes the
weights and computes with them. The method of this module makes none.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.models.utils import extract_layer_index

from attention_client.engines.vllm import remote
from eaas.errors import UnsupportedModelError
from eaas.types import ModelShape

__all__ = ["replace_routed_experts"]

_OVERLAPPED = SharedExpertsOrder.MK_INTERNAL_OVERLAPPED


class RemoteExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """A quantisation method that makes no weights; the expert servers compute.

    Args:
        moe: vLLM's configuration of the layer.
        layer: Index of the layer among the MoE layers.
    """

    # Each rank calls the servers with its own tokens, so vLLM exchanges none between data-parallel ranks.
    supports_internal_mk = True
    # vLLM then leaves the shared experts to `apply`, which computes them while the servers work.
    mk_can_overlap_shared_experts = True
    # The balancer moves experts between servers; vLLM has none to move.
    supports_eplb = False

    def __init__(self, moe: Any, layer: int) -> None:
        super().__init__(moe)
        self._layer: int = layer
        # The ranks of a tensor-parallel group have the same tokens, unless sequence parallelism splits them.
        shared = not moe.is_sequence_parallel
        self._rank: int = moe.tp_rank if shared else 0
        self._ranks: int = moe.tp_size if shared else 1

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Make no weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: there are no weights."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Keep the model's own sizes, which the servers have."""
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return the config of unquantised activations: they go to the servers as they are."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Ask the servers for the weighted sum of the routed experts; meanwhile compute the shared ones.

        Shapes: (T, H), (T, K), (T, K) -> (T, H) in the dtype of x. Under tensor parallelism each rank sends
        its share of the tokens and returns 0 for the others; vLLM's all-reduce adds them up.
        """
        where = (self._layer, self._rank, self._ranks)
        if shared_experts is None:
            out: torch.Tensor = torch.ops.eaas.experts(x, topk_ids, topk_weights, *where)
            return out
        handle = torch.ops.eaas.start_experts(x, topk_ids, topk_weights, *where)
        shared_experts(shared_experts_input, _OVERLAPPED)
        out = torch.ops.eaas.finish_experts(handle, x, topk_ids, topk_weights)
        return out


class RemoteRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """`RoutedExperts` of a model whose experts are on servers. Made only by `replace_routed_experts`."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        if self.apply_router_weight_on_input:
            raise UnsupportedModelError(
                f"{prefix}: this model multiplies the experts' input by the router's weight, which expert "
                "servers do not: serve it with local experts"
            )
        return RemoteExpertsMethod(moe_config, _moe_layer(prefix, remote.cluster().shape))


def replace_routed_experts() -> None:
    """Make vLLM build `RemoteRoutedExperts` in this process from now on.

    Raises:
        UnsupportedModelError: Another plugin has replaced `RoutedExperts`.
    """
    from vllm.model_executor.custom_op import op_registry_oot

    name = RoutedExperts.__name__
    other = op_registry_oot.get(name)
    if other is None:
        PluggableLayer.register_oot(name=name)(RemoteRoutedExperts)
    elif other is not RemoteRoutedExperts:
        raise UnsupportedModelError(
            f"another vLLM plugin has replaced {name} ({other.__module__}): remove it, or name the "
            "plugins to load in VLLM_PLUGINS"
        )


def _moe_layer(prefix: str, shape: ModelShape) -> int:
    """Return a layer's index among the MoE layers, from vLLM's name of its experts."""
    number = extract_layer_index(prefix)
    for index, name in enumerate(shape.layer_names):
        if extract_layer_index(name) == number:
            return index
    raise UnsupportedModelError(
        f"{prefix}: the cluster serves no experts of this layer (a draft model's layers are not served): "
        "turn off speculative decoding with this model's own layers"
    )
