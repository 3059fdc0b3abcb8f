"""vLLM's `RoutedExperts` without weights: its method asks the cluster's expert servers.

vLLM builds one `RoutedExperts` for each MoE layer and asks it for a quantisation method, which makes the
weights and computes with them. The method of this module makes none.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.models.utils import extract_layer_index

from attention_client.engines.vllm import remote
from eaas.errors import UnsupportedModelError
from eaas.types import ModelShape

__all__ = ["refuse_local_experts", "replace_routed_experts"]

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
        # `moe.tp_size` is another number: it counts data-parallel ranks, and is 1 under expert parallelism.
        shared = not moe.is_sequence_parallel
        self._rank: int = get_tensor_model_parallel_rank() if shared else 0
        self._ranks: int = get_tensor_model_parallel_world_size() if shared else 1

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


class RemoteRoutedExperts:
    """Mixed into `RoutedExperts` and its subclasses: the layer gets a `RemoteExpertsMethod`."""

    apply_router_weight_on_input: bool

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        if self.apply_router_weight_on_input:
            raise UnsupportedModelError(
                f"{prefix}: this model multiplies the experts' input by the router's weight, which expert "
                "servers do not: serve it with local experts"
            )
        return RemoteExpertsMethod(moe_config, _moe_layer(prefix, remote.cluster().shape))


def replace_routed_experts() -> None:
    """Make vLLM build layers with `RemoteRoutedExperts` in this process from now on.

    vLLM looks replacements up by the name of the class, so each subclass of `RoutedExperts` gets its own.
    Import the model's code before.

    Raises:
        UnsupportedModelError: Another plugin has replaced a class.
    """
    for cls in (RoutedExperts, *_subclasses(RoutedExperts)):
        other = op_registry_oot.get(cls.__name__)
        if other is None:
            remote_cls = type(f"Remote{cls.__name__}", (RemoteRoutedExperts, cls), {})
            PluggableLayer.register_oot(name=cls.__name__)(remote_cls)
        elif not issubclass(other, RemoteRoutedExperts):
            raise UnsupportedModelError(
                f"another vLLM plugin has replaced {cls.__name__} ({other.__module__}): remove it, or "
                "name the plugins to load in VLLM_PLUGINS"
            )


def refuse_local_experts(model: torch.nn.Module) -> None:
    """Check that no MoE layer of a built model has experts of its own.

    Raises:
        UnsupportedModelError: A layer has, or vLLM's code of this model has no `RoutedExperts`.
    """
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    local = [layer for layer in layers if not isinstance(layer.quant_method, RemoteExpertsMethod)]
    if local or not layers:
        what = f"{local[0].layer_name} has local experts" if local else "no layer has RoutedExperts"
        raise UnsupportedModelError(
            f"{type(model).__name__}: {what} in this version of vLLM: serve the model with "
            "`eaas up --engine transformers`, or with local experts"
        )


def _subclasses(cls: type) -> list[type]:
    """List all subclasses of a class, except those made by `replace_routed_experts`."""
    found: list[type] = []
    sub: type
    for sub in cls.__subclasses__():
        if not issubclass(sub, RemoteRoutedExperts):
            found += [sub, *_subclasses(sub)]
    return found


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
