"""Router dry run, for the scheduler: predict a prompt's experts in the first MoE layers from its gates alone.

Each gate gets the token embeddings through its own layer's norm, as if the layers before it added nothing.
This costs one product with the gate's matrix: no attention, no expert, no message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from attention_client.engines.transformers.routes import RoutesSeenError, RouteTap

__all__ = ["RouterDryRun"]

_NORM = "post_attention_layernorm"


class RouterDryRun:
    """Predicts a prompt's experts by running only the gates of a model's first MoE layers.

    Args:
        model: Model from `load_model`.
        layers: MoE layers to predict; fewer if the model has fewer.

    Attributes:
        tap: Intercepts the model's router choices.
        layers: MoE layers predicted (L).

    Raises:
        ValueError: The model's experts are local, or a decoder layer has no known norm before its experts.
    """

    def __init__(self, model: Any, layers: int) -> None:
        names = {
            module._eaas_layer: name
            for name, module in model.named_modules()
            if hasattr(module, "_eaas_experts")
        }
        if not names:
            raise ValueError("its experts are in this process")
        self.layers = min(layers, len(names))
        self._embed: nn.Embedding = model.get_input_embeddings()
        self.tap: RouteTap = model.get_submodule(names[0])._eaas_experts.tap
        self._gates: list[tuple[nn.Module, nn.Module]] = []
        for layer in range(self.layers):
            block, _, _ = names[layer].rpartition(".")
            decoder_layer = model.get_submodule(block.rpartition(".")[0])
            norm = getattr(decoder_layer, _NORM, None)
            if norm is None:
                raise ValueError(f"{type(decoder_layer).__name__} has no {_NORM}")
            self._gates.append((norm, model.get_submodule(block)))

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.int16]:
        """Predict the experts of T prompt tokens in each layer, int16 (L, T, K). Called by `Predictor`."""
        tokens_1T = torch.tensor([tokens], device=self._embed.weight.device)
        x_1TH = self._embed(tokens_1T)
        chosen = []
        for norm, block in self._gates:
            try:
                with self.tap.dry():
                    block(norm(x_1TH))
            except RoutesSeenError as seen:
                chosen.append(seen.ids_TK.cpu().numpy().astype(np.int16))
        return np.stack(chosen)
