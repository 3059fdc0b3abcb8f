"""Build, in an attention client, a transformers model whose routed experts are computed remotely.

No code here is specific to one model. While transformers builds the model, every class that uses its experts
interface is replaced by a subclass without weights. All other parts (attention, router, shared experts,
generation) are transformers' own and run in this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping

from attention_client.cluster import Cluster
from attention_client.engines.staging import Staging
from attention_client.engines.transformers.live_rows import LiveRows
from attention_client.engines.transformers.paged.model import RoutedExperts
from attention_client.engines.transformers.routes import RouteTap
from attention_client.layer_call.turns import micro_batch_tokens, pause
from eaas.checkpoint import Checkpoint
from eaas.checkpoint.quiet import quiet_transformers
from eaas.errors import (
    CheckpointError,
    CorruptShardError,
    MissingShardError,
    UnsupportedModelError,
)

__all__ = ["count_passes", "load_model", "remote_experts", "serving_dtype"]

_IMPLEMENTATION = "eaas"


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


def _weightless(cls: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of a transformers experts class without weights, because the servers hold them."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            cls.__init__(self, config, *args, **kwargs)
        for name in list(self._parameters):
            del self._parameters[name]
        # Keep transformers from initialising the removed parameters.
        self._is_hf_initialized = True

    return type(cls.__name__, (cls,), {"__init__": __init__, "_eaas_remote": True})


@contextlib.contextmanager
def _weightless_experts(checkpoint: Checkpoint) -> Iterator[None]:
    classes = {type(module) for module in checkpoint.expert_modules().values()}
    mapping = {cls.__name__: _weightless(cls) for cls in classes}
    register_patch_mapping(mapping, overwrite=True)
    try:
        yield
    finally:
        unregister_patch_mapping(list(mapping))


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
    state_dict = {key: checkpoint.slice(key) for key in checkpoint.other_keys()}
    model: PreTrainedModel
    try:
        with _weightless_experts(checkpoint), quiet_transformers():
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state_dict,
                dtype=wanted,
                experts_implementation=_IMPLEMENTATION,
                output_loading_info=True,
            )
    except RuntimeError as error:
        raise CorruptShardError(
            f"{path}: the weights do not fit the model of config.json "
            f"({' '.join(str(error).split())[:200]}): fetch the checkpoint again"
        ) from error
    if report["missing_keys"]:
        # transformers would use random weights instead.
        names = ", ".join(sorted(report["missing_keys"])[:3])
        raise MissingShardError(
            f"{path} lacks {len(report['missing_keys'])} tensor(s), for example {names}: "
            "complete the download"
        )
    _load_generation_config(model, path)
    rows = LiveRows()
    rows.attach(model)
    tap = RouteTap(checkpoint.shape)
    staging = Staging()
    layers = {name: layer for layer, name in enumerate(checkpoint.shape.layer_names)}
    found = 0
    for name, module in model.named_modules():
        if getattr(module, "_eaas_remote", False):
            module._eaas_layer = layers[name]
            module._eaas_cluster = cluster
            module._eaas_rows = rows
            module._eaas_tap = tap
            module._eaas_staging = staging
            found += 1
    if found != len(layers):
        raise UnsupportedModelError(
            f"{path}: only {found} of {len(layers)} expert layers of {model_class.__name__} can be remote"
        )
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


def _load_generation_config(model: PreTrainedModel, path: Path) -> None:
    """Load the checkpoint's own end tokens and sampling defaults into the model, if it has any."""
    if not (path / "generation_config.json").is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}/generation_config.json cannot be used ({' '.join(str(error).split())[:200]}): "
            "repair or remove it"
        ) from error
