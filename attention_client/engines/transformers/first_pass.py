"""One forward pass before a model serves: it finds a router or a layer that fails in every pass.

The routed experts answer zeros, so that no server takes part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attention_client.engines.transformers.remote_experts import remote_experts
from eaas.checkpoint import Checkpoint
from eaas.errors import UnsupportedModelError
from eaas.log import one_line

__all__ = ["check_first_pass", "without_experts"]

_TOKENS = 8


class _ZeroExperts:
    """Stands for the cluster; checks the routers' scores if it knows the layers' names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def layer_call(
        self,
        layer: int,
        x_TH: torch.Tensor,
        _ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        _wanted: object,
    ) -> torch.Tensor:
        """Answer zeros. Raises ValueError: a score is infinite or no number."""
        if self._names and not scores_TK.isfinite().all():
            router = self._names[layer].rpartition(".")[0]
            raise ValueError(f"the router of {router} gives scores that are no numbers")
        return torch.zeros_like(x_TH)


@contextlib.contextmanager
def without_experts(model: PreTrainedModel, names: tuple[str, ...] = ()) -> Iterator[None]:
    """Inside the block, the remote experts of a model answer zeros.

    Args:
        model: A transformers causal language model.
        names: Names of its MoE layers' experts: then scores of a router that are no numbers raise ValueError.
    """
    experts = remote_experts(model)
    if experts is None:
        yield
        return
    cluster, experts.cluster = experts.cluster, _ZeroExperts(names)
    try:
        yield
    finally:
        experts.cluster = cluster


@torch.no_grad()
def check_first_pass(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Run a few tokens through a model from `load_model`.

    Raises UnsupportedModelError: a layer fails, or a router's scores or the logits are no numbers.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens_1T = torch.arange(min(_TOKENS, vocabulary), device=model.device)[None]
    names = checkpoint.shape.layer_names
    try:
        with without_experts(model, names), _entered(model) as entered:
            logits = model(input_ids=tokens_1T, use_cache=False).logits
            if logits.isnan().any():
                raise ValueError("the logits are no numbers")
    except Exception as error:  # whatever the layer's code raises
        raise UnsupportedModelError(
            f"{checkpoint.source}: {entered[0]} fails in every pass ({one_line(error)}): check the "
            "experts, groups and experts per token in config.json, or download the weights again"
        ) from error


@contextlib.contextmanager
def _entered(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list with the name of the module that was entered last."""
    entered = ["the model"]

    def note(name: str) -> Any:
        return lambda *_: entered.__setitem__(0, name)

    handles = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()
