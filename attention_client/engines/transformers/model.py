"""Build, in an attention client, a transformers model whose routed experts are computed remotely.

No code here is specific to one model. The model is constructed without weights, and its routed experts lose
their parameters before transformers loads the others. All other parts (attention, router, shared experts,
generation) are transformers' own and run in this process.
"""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention_client.cluster import Cluster
from attention_client.engines.transformers.remote_experts import (
    IMPLEMENTATION,
    RemoteExperts,
    has_gradient,
    no_gradients,
)
from eaas.checkpoint import Checkpoint
from eaas.checkpoint.construct import construct, own_ties
from eaas.checkpoint.quiet import quiet_transformers
from eaas.checkpoint.transformers_files import generation_config
from eaas.errors import (
    CorruptShardError,
    MissingShardError,
)
from eaas.log import one_line

__all__ = ["load_model", "serving_dtype"]

# transformers' loader is not made for several threads.
_LOADING = threading.Lock()


def _refuse_gradients(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise GradientError before a forward pass whose gradients would have to pass the experts."""
    if not torch.is_grad_enabled():
        return
    for name, value in (*enumerate(args), *kwargs.items()):
        if has_gradient(value):
            raise no_gradients(f"the model's argument {name}")
    # The head comes after the experts. If it is tied to the embedding, that has its parameter.
    head = model.get_output_embeddings()
    after = set() if head is None else set(head.parameters())
    before = after & set(model.get_input_embeddings().parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter not in after or parameter in before):
            raise no_gradients(f"the parameter {name}")


def _remove_weights(module: Any) -> None:
    """Remove the parameters of an experts module: the servers hold its weights."""
    for name in list(module._parameters):
        del module._parameters[name]
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
    config._experts_implementation = IMPLEMENTATION
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
    experts = RemoteExperts(cluster, checkpoint.shape)
    experts.rows.attach(model)
    for layer, name in enumerate(checkpoint.shape.layer_names):
        experts.attach(model.get_submodule(name), layer)
    model.register_forward_pre_hook(_refuse_gradients, with_kwargs=True)
    return model.eval().requires_grad_(False)


def serving_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Choose the dtype in which an endpoint computes a checkpoint on the CPU.

    float16 becomes float32, which holds all of its values, as on the expert servers. Few CPUs multiply
    float16 fast, and bfloat16 would drop three of its eleven bits.
    """
    dtype: torch.dtype = getattr(torch, checkpoint.shape.dtype)
    return torch.float32 if dtype is torch.float16 else dtype
