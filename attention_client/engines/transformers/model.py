"""Build, in an attention client, a transformers model whose routed experts are computed remotely.

No code here is specific to one model. The model is constructed without weights, and its routed experts lose
their parameters before transformers loads the others. All other parts (attention, router, shared experts,
generation) are transformers' own and run in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from attention_client.cluster import Cluster
from attention_client.engines.staging import Staging
from attention_client.engines.transformers.live_rows import LiveRows
from attention_client.engines.transformers.paged.model import RoutedExperts
from attention_client.engines.transformers.routes import RouteTap
from attention_client.layer_call.turns import micro_batch_tokens, pause
from eaas.checkpoint import Checkpoint
from eaas.checkpoint.construct import construct, own_ties
from eaas.checkpoint.quiet import quiet_transformers
from eaas.checkpoint.transformers_files import generation_config
from eaas.errors import (
    CorruptShardError,
    GradientError,
    MissingShardError,
)
from eaas.log import one_line

__all__ = ["count_passes", "load_model", "remote_experts", "serving_dtype"]

_IMPLEMENTATION = "eaas"
# transformers' loader is not made for several threads.
_LOADING = threading.Lock()


def _remote_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Replace a MoE layer's routed experts in the forward pass: compute them on the expert servers.

    In a micro-batch, lets the other one compute meanwhile.

    Shapes: (T, H), (T, K), (T, K) -> (T, H) in the dtype of hidden_states.
    """
    if torch.compiler.is_exporting():
        scores = top_k_weights.float()
        out: torch.Tensor = torch.ops.eaas.routed_experts(
            hidden_states, top_k_index, scores, self._eaas_layer
        )
        return out
    if _has_gradient(hidden_states) or _has_gradient(top_k_weights):
        raise _no_gradients("the input of an expert layer")
    inputs = hidden_states.detach(), top_k_index, top_k_weights.detach()
    if hidden_states.is_cpu:
        return _call_experts(self, *inputs)
    staging: Staging = self._eaas_staging
    staged = staging.to_host(*inputs)
    try:
        return staged.to_device(_call_experts(self, *staged.tensors))
    finally:
        # A failed call and a dry run end here, too.
        staged.drop()


def _call_experts(
    self: Any, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
) -> torch.Tensor:
    """Compute the routed experts of tokens in host memory; returns (T, H) there, in their dtype."""
    cluster: Cluster = self._eaas_cluster
    part = micro_batch_tokens()
    self._eaas_tap.see(self._eaas_layer, ids_TK, part)
    arguments = (
        self._eaas_layer,
        x_TH,
        ids_TK,
        # Compiled layer calls take float32 alone.
        scores_TK.float(),
        self._eaas_rows.wanted(x_TH.shape[0], part),
    )
    if part is None:
        return cluster.layer_call(*arguments).to(x_TH.dtype)
    with cluster.start_layer_call(*arguments) as call:
        pause()
        return call.finish().to(x_TH.dtype)


ExpertsInterface.register(_IMPLEMENTATION, _remote_forward)


def _has_gradient(value: object) -> bool:
    """Whether a value is a tensor that the caller differentiates, backward or forward."""
    return isinstance(value, torch.Tensor) and (
        (value.requires_grad and torch.is_grad_enabled())
        or forward_ad.unpack_dual(value).tangent is not None  # type: ignore[no-untyped-call]
    )


def _no_gradients(what: str) -> GradientError:
    return GradientError(
        f"{what} requires a gradient, and none passes through remote experts: call the model under "
        "torch.no_grad(), or remove requires_grad"
    )


def _refuse_gradients(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise GradientError before a forward pass whose gradients would have to pass the experts."""
    if not torch.is_grad_enabled():
        return
    for name, value in (*enumerate(args), *kwargs.items()):
        if _has_gradient(value):
            raise _no_gradients(f"the model's argument {name}")
    # The head comes after the experts. If it is tied to the embedding, that has its parameter.
    head = model.get_output_embeddings()
    after = set() if head is None else set(head.parameters())
    before = after & set(model.get_input_embeddings().parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter not in after or parameter in before):
            raise _no_gradients(f"the parameter {name}")


def _remove_weights(module: Any) -> None:
    """Make an experts module remote: the servers hold its weights."""
    for name in list(module._parameters):
        del module._parameters[name]
    module._eaas_remote = True
    # Keep transformers from initialising the removed parameters.
    module._is_hf_initialized = True


def _load_weights(model: PreTrainedModel, state_dict: dict[str, Any], dtype: torch.dtype) -> Any:
    """Load weights with transformers' loader into a model that is constructed; returns its report."""

    class Constructed(type(model)):  # type: ignore[misc]
        """Lets `from_pretrained` take the model as it is, and change nothing that other threads see."""

        def __new__(cls, config: Any) -> Any:
            return model

        @classmethod
        def get_init_context(cls, *args: Any, **kwargs: Any) -> list[Any]:
            return []

    with own_ties(model):
        _, report = Constructed.from_pretrained(
            None, config=model.config, state_dict=state_dict, dtype=dtype, output_loading_info=True
        )
    return report


def load_model(
    checkpoint: Checkpoint, cluster: Cluster | None, *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Build a model without reading the routed experts' tensors; a cluster computes these experts.

    Args:
        checkpoint: Source of the other weights.
        cluster: Computes the routed experts; None: the model is only exported.
        dtype: Weight dtype; defaults to the checkpoint's.

    Returns:
        transformers' own model, in eval mode.

    Raises:
        CheckpointError: See its subclasses.
    """
    path = checkpoint.path
    config = checkpoint.config
    wanted = dtype or getattr(torch, checkpoint.shape.dtype)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    config = deepcopy(config)
    config._experts_implementation = _IMPLEMENTATION
    state_dict = {key: checkpoint.slice(key) for key in checkpoint.other_keys()}
    try:
        with _LOADING, quiet_transformers():
            model: PreTrainedModel = construct(model_class, config, wanted)
            for name in checkpoint.shape.layer_names:
                _remove_weights(model.get_submodule(name))
            report = _load_weights(model, state_dict, wanted)
    except RuntimeError as error:
        raise CorruptShardError(
            f"{path}: the weights do not fit the model of config.json "
            f"({one_line(error)}): use files and config.json of one version"
        ) from error
    if report["missing_keys"]:
        # transformers would use random weights instead.
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise MissingShardError(
            f"{path} lacks {len(report['missing_keys'])} tensor(s), for example {names}: "
            "use files and config.json of one version"
        )
    model.generation_config = generation_config(checkpoint.path, checkpoint.config)
    rows = LiveRows()
    rows.attach(model)
    tap = RouteTap(checkpoint.shape)
    staging = Staging()
    for layer, name in enumerate(checkpoint.shape.layer_names):
        module = model.get_submodule(name)
        module._eaas_layer = layer
        module._eaas_cluster = cluster
        module._eaas_rows = rows
        module._eaas_tap = tap
        module._eaas_staging = staging
    model.register_forward_pre_hook(_refuse_gradients, with_kwargs=True)
    return model.eval().requires_grad_(False)


def serving_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Choose the dtype in which an endpoint computes a checkpoint on the CPU.

    float16 becomes float32, which holds all of its values, as on the expert servers. Few CPUs multiply
    float16 fast, and bfloat16 would drop three of its eleven bits.
    """
    dtype: torch.dtype = getattr(torch, checkpoint.shape.dtype)
    return torch.float32 if dtype is torch.float16 else dtype


def remote_experts(model: PreTrainedModel) -> RoutedExperts | None:
    """Return what computes the routed experts of a model from `load_model`; None for another model."""
    remote = _remote_module(model)
    if remote is None:
        return None
    cluster: Cluster = remote._eaas_cluster
    tap: RouteTap = remote._eaas_tap

    def routed_experts(
        layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
    ) -> torch.Tensor:
        tap.see(layer, ids_TK, None)
        return cluster.layer_call(layer, x_TH, ids_TK, scores_TK, None)

    return routed_experts


def count_passes(model: PreTrainedModel) -> Callable[[], None]:
    """Return what counts a compiled pass of a model from `load_model`; it does nothing for another model."""
    remote = _remote_module(model)
    if remote is None:
        return lambda: None
    count: Callable[[], None] = remote._eaas_cluster.metrics.forwards.labels("compiled").inc
    return count


def _remote_module(model: PreTrainedModel) -> Any | None:
    """Return a module whose experts a cluster computes."""
    modules = (m for m in model.modules() if getattr(m, "_eaas_remote", False))
    remote = next(modules, None)
    return None if remote is None or remote._eaas_cluster is None else remote
